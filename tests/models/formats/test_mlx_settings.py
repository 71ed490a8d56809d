"""The settings of MLX's modules: whose they are under other names, and settings that are not a module's own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.mini import write_checkpoint
from tests.models.formats.quantised import Case, mlx
from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.checkpoint import Checkpoint, open_checkpoint

EIGHT = {"bits": 8, "group_size": 32}
SIX = {"bits": 6, "group_size": 64}


def model(*weights: Case, own: dict[str, Any], **config: Any) -> Case:
    """A model of 4 bits in groups of 64, with settings of modules of their own."""
    entry = {"bits": 4, "group_size": 64, **own}
    tensors = {name: array for weight in weights for name, array in weight.tensors.items()}
    plain = {name: array for weight in weights for name, array in weight.plain.items()}
    whole = {"model_type": "llama", "dtype": "bfloat16", "quantization": entry, "quantization_config": entry, **config}
    return replace(weights[0], tensors=tensors, plain=plain, config=whole)


def opened(folder: Path, case: Case) -> Checkpoint:
    return open_checkpoint(write_checkpoint(folder, case.tensors, case.config))


def check(folder: Path, case: Case) -> None:
    with opened(folder, case) as checkpoint:
        assert sorted(checkpoint.specs) == sorted(case.plain)
        for name, plain in case.plain.items():
            np.testing.assert_array_equal(checkpoint.read(name), plain)


def four(name: str, shape: tuple[int, int] = (8, 128)) -> Case:
    return mlx(shape, name=name)


def eight(name: str, shape: tuple[int, int] = (8, 128)) -> Case:
    return mlx(shape, bits=8, group_size=32, name=name)


Q, K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")


@pytest.mark.parametrize(
    ("stored", "written"),
    [
        ("model.layers.0.self_attn", "model.language_model.layers.0.self_attn"),
        ("model.layers.0.self_attn", "language_model.model.layers.0.self_attn"),
        ("language_model.model.layers.0.self_attn", "model.layers.0.self_attn"),
        ("language_model.model.layers.0.self_attn", "model.language_model.layers.0.self_attn"),
        ("layers.0.self_attn", "model.layers.0.self_attn"),
    ],
)
def test_settings_are_found_under_the_name_in_another_wrapper(stored: str, written: str, tmp_path: Path) -> None:
    """8 bits in groups of 32 have the shapes of 4 in groups of 64: nothing else tells."""
    own = {f"{written}.v_proj": EIGHT, "language_model.lm_head": EIGHT}
    check(tmp_path, model(four(f"{stored}.q_proj"), eight(f"{stored}.v_proj"), eight("lm_head"), own=own))


def test_other_bits_are_found_under_another_name_too(tmp_path: Path) -> None:
    six = mlx((8, 128), bits=6, name=V)
    check(tmp_path, model(four(Q), six, own={V.replace("model.", "model.language_model."): SIX}))


@pytest.mark.parametrize("value", [EIGHT, {"bits": 8}, {"bits": 4, "group_size": 64, "mode": "mxfp4"}])
def test_settings_of_no_module_are_an_error(value: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"of the module 'transformer\.h\.0\.v_proj', and the model has no such"):
        opened(tmp_path, model(four(Q), four(V), own={"transformer.h.0.v_proj": value}))


@pytest.mark.parametrize("value", [False, True, {"bits": 4}, {"group_size": 64, "bits": 4, "mode": "affine"}, {}])
def test_settings_of_no_module_that_change_nothing_are_harmless(value: Any, tmp_path: Path) -> None:
    check(tmp_path, model(four(Q), own={"model.vision_tower.patch": value}))


def test_two_settings_of_one_module_are_an_error(tmp_path: Path) -> None:
    own = {V: EIGHT, V.replace("model.", "language_model.model."): SIX}
    with pytest.raises(FormatError, match=f"config.json has two settings of the module '{V}'"):
        opened(tmp_path, model(four(Q), eight(V), own=own))


def test_a_name_that_two_modules_may_have_is_not_guessed(tmp_path: Path) -> None:
    twin = V.replace("model.", "language_model.")
    with pytest.raises(FormatError, match="the model has no such module"):
        opened(tmp_path, model(eight(V), eight(twin), own={V.replace("model.", "model.model."): EIGHT}))


# ---- widths

UP, DOWN, GATE = (f"model.layers.0.mlp.{part}_proj" for part in ("up", "down", "gate"))
WRONG: dict[str, tuple[Case, str]] = {
    "lm_head": (
        model(four(Q), eight("lm_head"), own={}, hidden_size=128),
        "'lm_head.weight' has 256 inputs .* hidden_size is 128",
    ),
    "embedding": (
        model(eight("model.embed_tokens"), own={}, text_config={"hidden_size": 128}),
        "'model.embed_tokens.weight' has 256 inputs .* hidden_size is 128",
    ),
    "q of 4 bits": (model(four(Q), own={Q: EIGHT}, hidden_size=128), f"'{Q}.weight' has 64 inputs .* hidden_size is 128"),
    "siblings": (model(four(Q), eight(V), own={}), f"has (128|256) inputs .*, and '{Q[:-6]}(v|q)_proj' has (128|256):"),
    "gate and up": (model(four(GATE), eight(UP), own={}), "the settings are not its own"),
    "down": (
        model(four(GATE, (64, 128)), four(UP, (64, 128)), eight(DOWN, (128, 64)), own={}),
        f"'{DOWN}.weight' has 128 inputs .*, and '{GATE}' has 64 outputs",
    ),
    "two bits": (model(mlx((8, 128), bits=2, group_size=128, name=Q), own={}, hidden_size=128), "has 64 inputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_width_that_other_settings_explain_is_an_error(name: str, tmp_path: Path) -> None:
    case, message = WRONG[name]
    with pytest.raises(FormatError, match=message):
        opened(tmp_path, case)


def test_widths_that_differ_for_other_reasons_are_read(tmp_path: Path) -> None:
    """Towers have hidden states of their own, and attention over another sequence has other inputs for k and v."""
    weights = four(Q), four(f"{Q[:-6]}o_proj", (128, 64)), four("vision_tower.layers.0.q_proj", (8, 256)), four(K, (8, 192))
    check(tmp_path, model(*weights, own={}, hidden_size=128))


@pytest.mark.parametrize("stated", [{"attention_hidden_size": 256}, {"depth_decoder_config": {"hidden_size": 256}}])
def test_the_hidden_size_is_no_check_where_other_modules_have_others(stated: dict[str, Any], tmp_path: Path) -> None:
    """Zamba2's attention reads two hidden states side by side; a second decoder has its own."""
    check(tmp_path, model(four(Q, (8, 256)), own={}, hidden_size=128, **stated))


# ---- convolutions over time, which MLX stores as [channels, kernel, 1]

CONVOLUTION = "model.layers.0.conv.conv.weight"


def with_convolution(*shape: int) -> tuple[Case, np.ndarray]:
    kernel = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    case = model(four(Q), own={}, model_type="lfm2")
    return replace(case, tensors={**case.tensors, CONVOLUTION: kernel}), kernel


@pytest.mark.parametrize("shape", [(8, 4, 1), (8, 1, 4)])
def test_convolutions_have_the_layout_of_the_hub(shape: tuple[int, ...], tmp_path: Path) -> None:
    case, kernel = with_convolution(*shape)
    with opened(tmp_path, case) as checkpoint:
        assert checkpoint.decoded == "MLX"
        np.testing.assert_array_equal(checkpoint[CONVOLUTION], kernel.reshape(8, 1, 4))
        np.testing.assert_array_equal(checkpoint[f"{Q}.weight"], case.plain[f"{Q}.weight"])


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", ["lfm2"]])
def test_models_of_which_mlx_changes_other_weights_are_refused(model_type: object, quantised: bool, tmp_path: Path) -> None:
    """mlx-lm adds 1 to the norms of Qwen3-Next, and multiplies weights of Falcon-H1, as it moves the axis of the kernel."""
    case, kernel = with_convolution(8, 4, 1)
    tensors = case.tensors if quantised else {CONVOLUTION: kernel, "model.norm.weight": kernel[0, :, 0]}
    config = {**case.config, "model_type": model_type} if quantised else {"model_type": model_type}
    folder = write_checkpoint(tmp_path / "mlx", tensors, config)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(Unsupported, match=re.escape(f"for model_type {model_type!r} what it changes is not undone")):
        open_checkpoint(folder)
    if not quantised:  # a pointwise convolution of another program
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with open_checkpoint(folder) as plain:
            assert plain.specs[CONVOLUTION].shape == (8, 4, 1)
