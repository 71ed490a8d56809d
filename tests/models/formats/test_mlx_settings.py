"""The settings of MLX's modules: whose they are under other names, and settings that are not a module's own."""

from __future__ import annotations

import json
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


def model(*weights: Case, overrides: dict[str, Any], **config: Any) -> Case:
    """A model of 4 bits in groups of 64, with settings of modules of their own."""
    entry = {"bits": 4, "group_size": 64, **overrides}
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
    overrides = {f"{written}.v_proj": EIGHT, "language_model.lm_head": EIGHT}
    check(tmp_path, model(four(f"{stored}.q_proj"), eight(f"{stored}.v_proj"), eight("lm_head"), overrides=overrides))


def test_other_bits_are_found_under_another_name_too(tmp_path: Path) -> None:
    six = mlx((8, 128), bits=6, name=V)
    check(tmp_path, model(four(Q), six, overrides={V.replace("model.", "model.language_model."): SIX}))


@pytest.mark.parametrize("value", [EIGHT, {"bits": 8}, {"bits": 4, "group_size": 64, "mode": "mxfp4"}])
def test_settings_of_no_module_are_an_error(value: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"of the module 'transformer\.h\.0\.v_proj', and the model has no such"):
        opened(tmp_path, model(four(Q), four(V), overrides={"transformer.h.0.v_proj": value}))


@pytest.mark.parametrize("value", [False, True, {"bits": 4}, {"group_size": 64, "bits": 4, "mode": "affine"}, {}])
def test_settings_of_no_module_that_change_nothing_are_harmless(value: Any, tmp_path: Path) -> None:
    check(tmp_path, model(four(Q), overrides={"model.vision_tower.patch": value}))


def test_two_settings_of_one_module_are_an_error(tmp_path: Path) -> None:
    overrides = {V: EIGHT, V.replace("model.", "language_model.model."): SIX}
    with pytest.raises(FormatError, match=f"config.json has two settings of the module '{V}'"):
        opened(tmp_path, model(four(Q), eight(V), overrides=overrides))


def test_a_name_that_two_modules_may_have_is_not_guessed(tmp_path: Path) -> None:
    twin = V.replace("model.", "language_model.")
    with pytest.raises(FormatError, match="the model has no such module"):
        opened(tmp_path, model(eight(V), eight(twin), overrides={V.replace("model.", "model.model."): EIGHT}))


# ---- widths

UP, DOWN, GATE = (f"model.layers.0.mlp.{part}_proj" for part in ("up", "down", "gate"))
WRONG: dict[str, tuple[Case, str]] = {
    "lm_head": (
        model(four(Q), eight("lm_head"), overrides={}, hidden_size=128),
        "'lm_head.weight' has 256 inputs .* hidden_size is 128",
    ),
    "embedding": (
        model(eight("model.embed_tokens"), overrides={}, text_config={"hidden_size": 128}),
        "'model.embed_tokens.weight' has 256 inputs .* hidden_size is 128",
    ),
    "q of 4 bits": (model(four(Q), overrides={Q: EIGHT}, hidden_size=128), f"'{Q}.weight' has 64 inputs .* hidden_size is 128"),
    "siblings": (model(four(Q), eight(V), overrides={}), f"has (128|256) inputs .*, and '{Q[:-6]}(v|q)_proj' has (128|256):"),
    "gate and up": (model(four(GATE), eight(UP), overrides={}), "the settings are not its own"),
    "down": (
        model(four(GATE, (64, 128)), four(UP, (64, 128)), eight(DOWN, (128, 64)), overrides={}),
        f"'{DOWN}.weight' has 128 inputs .*, and '{GATE}' has 64 outputs",
    ),
    "two bits": (model(mlx((8, 128), bits=2, group_size=128, name=Q), overrides={}, hidden_size=128), "has 64 inputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_width_that_other_settings_explain_is_an_error(name: str, tmp_path: Path) -> None:
    case, message = WRONG[name]
    with pytest.raises(FormatError, match=message):
        opened(tmp_path, case)


def test_widths_that_differ_for_other_reasons_are_read(tmp_path: Path) -> None:
    """Towers have hidden states of their own, and attention over another sequence has other inputs for k and v."""
    weights = four(Q), four(f"{Q[:-6]}o_proj", (128, 64)), four("vision_tower.layers.0.q_proj", (8, 256)), four(K, (8, 192))
    check(tmp_path, model(*weights, overrides={}, hidden_size=128))


@pytest.mark.parametrize("stated", [{"attention_hidden_size": 256}, {"depth_decoder_config": {"hidden_size": 256}}])
def test_the_hidden_size_is_no_check_where_other_modules_have_others(stated: dict[str, Any], tmp_path: Path) -> None:
    """Zamba2's attention reads two hidden states side by side; a second decoder has its own."""
    check(tmp_path, model(four(Q, (8, 256)), overrides={}, hidden_size=128, **stated))


# ---- convolutions over time, which MLX stores as [channels, kernel, 1]

CONVOLUTION = "model.layers.0.conv.conv.weight"


def with_convolution(*shape: int) -> tuple[Case, np.ndarray]:
    kernel = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    case = model(four(Q), overrides={}, model_type="lfm2")
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


def of_mlx(folder: Path, tensors: dict[str, np.ndarray], model_type: str, **config: Any) -> Path:
    """A model with plain weights that MLX has written."""
    write_checkpoint(folder, tensors, {"model_type": model_type, "dtype": "float32", **config})
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


PATCHES = "vision_tower.embeddings.patch_embedding.weight"


@pytest.mark.parametrize(
    ("name", "of_the_hub", "of_mlx_vlm"),
    [
        (PATCHES, (8, 3, 14, 14), (8, 14, 14, 3)),
        ("visual.patch_embed.proj.weight", (8, 3, 2, 14, 14), (8, 2, 14, 14, 3)),
        ("vision_tower.blocks.0.conv_pw.weight", (8, 16, 1, 1), (8, 1, 1, 16)),
        ("audio_tower.conv1.weight", (8, 80, 3), (8, 3, 80)),
    ],
)
@pytest.mark.parametrize("quantised", [True, False])
def test_kernels_with_their_inputs_last_are_refused(
    name: str, of_the_hub: tuple[int, ...], of_mlx_vlm: tuple[int, ...], quantised: bool, tmp_path: Path
) -> None:
    """mlx-vlm moves an axis of them, and renames modules, so that transformers could not load the result."""
    case = model(four(Q), overrides={}, model_type="gemma3")
    tensors = case.tensors if quantised else {f"{Q}.weight": np.ones((4, 4), np.float32)}
    kernel = np.zeros(of_mlx_vlm, np.float32)
    folder = of_mlx(tmp_path / "mlx", {**tensors, name: kernel}, **{**case.config, "model_type": "gemma3"})
    if not quantised:
        (folder / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(Unsupported, match=f"MLX has stored '{name}' as .*, with its inputs last"):
        open_checkpoint(folder)
    kernel = np.zeros(of_the_hub, np.float32)
    safetensors.numpy.save_file({**tensors, name: kernel}, folder / "model.safetensors", metadata={"format": "mlx"})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.specs[name].shape == of_the_hub


def test_weights_of_gpt2_are_refused(tmp_path: Path) -> None:
    """mlx-lm stores them [outputs, inputs], and transformers has them the other way round."""
    folder = of_mlx(tmp_path / "mlx", {"h.0.attn.c_proj.weight": np.zeros((4, 4), np.float32)}, "gpt2")
    with pytest.raises(Unsupported, match=re.escape("MLX weights of model_type 'gpt2' are not read")):
        open_checkpoint(folder)


EXPERTS = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)


@pytest.mark.parametrize(
    ("model_type", "count", "stack", "single"),
    [
        ("qwen3_moe", "num_experts", "model.layers.0.mlp.switch_mlp.up_proj", "model.layers.0.mlp.experts.{}.up_proj"),
        (
            "mixtral",
            "num_local_experts",
            "model.layers.0.block_sparse_moe.switch_mlp.gate_proj",
            "model.layers.0.block_sparse_moe.experts.{}.w1",
        ),
    ],
)
def test_plain_experts_that_mlx_has_stacked_are_apart(
    model_type: str, count: str, stack: str, single: str, tmp_path: Path
) -> None:
    tensors = {f"{stack}.weight": EXPERTS, "model.norm.weight": EXPERTS[0, 0]}
    with open_checkpoint(of_mlx(tmp_path / "mlx", tensors, model_type, **{count: 3})) as checkpoint:
        assert sorted(checkpoint.specs) == [*(f"{single.format(expert)}.weight" for expert in range(3)), "model.norm.weight"]
        for expert in range(3):
            np.testing.assert_array_equal(checkpoint[f"{single.format(expert)}.weight"], EXPERTS[expert])


@pytest.mark.parametrize(
    ("model_type", "stack"),
    [("step3p5", "mlp.switch_mlp"), ("gemma4", "experts.switch_glu"), ("qwen3_moe", "experts.switch_glu")],
)
def test_plain_stacks_of_other_models_are_refused(model_type: str, stack: str, tmp_path: Path) -> None:
    """mlx-lm adds 1 to the norms of Step 3.5 as it stacks the experts."""
    tensors = {f"model.layers.0.{stack}.up_proj.weight": EXPERTS}
    folder = of_mlx(tmp_path / "mlx", tensors, model_type, num_experts=3)
    with pytest.raises(Unsupported, match=f"are not read for model_type '{model_type}'"):
        open_checkpoint(folder)


def test_plain_stacks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    stack = "model.layers.0.mlp.switch_mlp.up_proj.weight"
    folder = of_mlx(tmp_path / "a", {stack: EXPERTS}, "qwen3_moe", num_experts=4)
    with pytest.raises(FormatError, match=re.escape("is [3, 4, 2], and config.json says [4] experts")):
        open_checkpoint(folder)
    twice = {stack: EXPERTS, "model.layers.0.mlp.experts.1.up_proj.weight": EXPERTS[1]}
    folder = of_mlx(tmp_path / "b", twice, "qwen3_moe", num_experts=3)
    with pytest.raises(FormatError, match="is stored twice: by itself, and in"):
        open_checkpoint(folder)


@pytest.mark.parametrize("quantised", [True, False])
def test_modules_that_mlx_renames_have_the_names_of_the_hub(quantised: bool, tmp_path: Path) -> None:
    """transformers would leave the whole language model of Gemma 4 at random numbers."""
    q = "layers.0.self_attn.q_proj"
    case = model(four(f"language_model.model.{q}"), overrides={})
    text = case.tensors if quantised else case.plain
    others = {"language_model.model.norm.weight": "model.language_model.norm.weight", "embed_vision.w": "model.embed_vision.w"}
    tensors = {**text, **dict.fromkeys(others, np.ones(4, np.float32))}
    folder = of_mlx(tmp_path / "mlx", tensors, "gemma4")
    config = {**case.config, "model_type": "gemma4"} if quantised else {"model_type": "gemma4"}
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        assert sorted(checkpoint.specs) == sorted([f"model.language_model.{q}.weight", *others.values()])
        plain = case.plain[f"language_model.model.{q}.weight"]
        np.testing.assert_array_equal(checkpoint[f"model.language_model.{q}.weight"], plain)
    as_on_the_hub = {f"model.{name}": array for name, array in tensors.items() if name in others}
    safetensors.numpy.save_file(as_on_the_hub, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "config.json").write_text('{"model_type": "gemma4"}')
    with open_checkpoint(folder) as checkpoint:
        assert sorted(checkpoint.specs) == sorted(as_on_the_hub)


ROUTED = {"model.layers.0.mlp.experts.0.up_proj.weight": EXPERTS[0], "model.layers.0.mlp.gate.weight": EXPERTS[0]}


@pytest.mark.parametrize(
    ("model_type", "tensors", "why"),
    [
        ("youtu", {"model.layers.0.self_attn.embed_q.weight": EXPERTS}, "split kv_b_proj in two"),
        ("dots1", {"model.layers.0.mlp.experts.up_proj.weight": EXPERTS}, "stacked experts"),
        ("gpt_oss", {"model.layers.0.mlp.experts.down_proj.weight": EXPERTS}, "stacked experts"),
        ("granitemoehybrid", {"model.layers.0.mlp.up_proj.weight": EXPERTS[0]}, "split shared_mlp.input_linear in two"),
        ("baichuan_m1", {"lm_head.weight": EXPERTS[0]}, "divided the rows of the head by their norms"),
        ("dbrx", {"transformer.blocks.0.ffn.experts.0.w2.weight": EXPERTS[0]}, "split experts.mlp"),
        ("hunyuan", {"model.layers.0.self_attn.q_proj.weight": EXPERTS[0]}, "split qkv_proj and gate_and_up_proj"),
        ("hunyuan", {"model.layers.0.mlp.gate_proj.weight": EXPERTS[0]}, "split qkv_proj and gate_and_up_proj"),
        ("muse_spark", {"model.language_model.layers.0.self_attn.qkvg_proj.weight": EXPERTS[0]}, "joined projections"),
        ("ernie4_5_moe", ROUTED, "left out tensors that routers need: e_score_correction_bias"),
    ],
)
def test_weights_that_mlx_has_made_of_others_are_refused(
    model_type: str, tensors: dict[str, np.ndarray], why: str, tmp_path: Path
) -> None:
    """transformers would leave those that it looks for at random numbers."""
    folder = of_mlx(tmp_path / "mlx", tensors, model_type)
    with pytest.raises(Unsupported, match=f"MLX has {why}"):
        open_checkpoint(folder)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with open_checkpoint(folder) as plain:
        assert plain.specs.keys() == tensors.keys()


def test_matrices_under_such_names_are_read(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.embed_q.weight": EXPERTS[0], "model.layers.0.mlp.up_proj.weight": EXPERTS[0]}
    for name, model_type, more in (("a", "other", {}), ("b", "ernie4_5_moe", {"model.e_score_correction_bias": EXPERTS[0, 0]})):
        with open_checkpoint(of_mlx(tmp_path / name, {**tensors, **ROUTED, **more}, model_type)) as checkpoint:
            assert checkpoint.specs.keys() == {**tensors, **ROUTED, **more}.keys()


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("qwen3_vl", {"language_model.model.norm.weight": "model.language_model.norm.weight"}),
        ("qwen2_vl", {"language_model.lm_head.weight": "lm_head.weight"}),
        (
            "gpt_neox",
            {
                "model.h.0.attention.dense.weight": "gpt_neox.layers.0.attention.dense.weight",
                "model.embed_in.weight": "gpt_neox.embed_in.weight",
                "model.embed_out.weight": "embed_out.weight",
            },
        ),
        ("gptj", {"model.h.0.mlp.fc_in.weight": "transformer.h.0.mlp.fc_in.weight", "lm_head.weight": "lm_head.weight"}),
    ],
)
def test_names_that_mlx_lm_begins_otherwise_are_those_of_the_hub(
    model_type: str, names: dict[str, str], tmp_path: Path
) -> None:
    tensors = {name: np.full((2, 2), i, np.float32) for i, name in enumerate(names)}
    with open_checkpoint(of_mlx(tmp_path / "mlx", tensors, model_type)) as checkpoint:
        assert sorted(checkpoint.specs) == sorted(names.values())
        for stored, name in names.items():
            np.testing.assert_array_equal(checkpoint[name], tensors[stored])


@pytest.mark.parametrize("name", ["model.layers.0.mixer.q_conv1d.weight", "model.layers.0.temporal_block.conv_1d.weight"])
def test_convolutions_of_other_names_have_the_layout_of_the_hub(name: str, tmp_path: Path) -> None:
    model_type = "olmo_hybrid" if "q_conv1d" in name else "recurrent_gemma"
    kernel = np.arange(32, dtype=np.float32).reshape(8, 4, 1)
    with open_checkpoint(of_mlx(tmp_path / "mlx", {name: kernel}, model_type)) as checkpoint:
        np.testing.assert_array_equal(checkpoint[name], kernel.reshape(8, 1, 4))


def test_a_scalar_of_apertus_has_the_shape_of_the_hub(tmp_path: Path) -> None:
    """transformers refuses a parameter of another shape."""
    name = "model.layers.0.mlp.act_fn.alpha_p"
    with open_checkpoint(of_mlx(tmp_path / "mlx", {name: np.array(0.5, np.float32)}, "apertus")) as checkpoint:
        np.testing.assert_array_equal(checkpoint[name], [0.5])


def test_vectors_of_rwkv_7_have_the_shape_of_the_hub(tmp_path: Path) -> None:
    """mlx-lm 0.32.2 makes [heads, head_dim] of them, and of r_k, which is so on the Hub too, nothing."""
    names = [f"model.layers.0.attn.{name}" for name in ("k_k", "k_a", "g_norm.weight", "g_norm.bias", "r_k")]
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    with open_checkpoint(of_mlx(tmp_path / "mlx", dict.fromkeys(names, values), "rwkv7")) as checkpoint:
        assert [checkpoint[name].shape for name in names] == [(8,)] * 4 + [(2, 4)]
        np.testing.assert_array_equal(checkpoint[names[0]], values.ravel())


@pytest.mark.parametrize(
    ("config", "noted"),
    [
        ({"model_type": "qwen2_vl"}, True),
        ({"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}, True),
        ({"model_type": "qwen3_vl", "text_config": {}}, True),
        ({"model_type": "qwen3_5_text", "text_config": {}}, False),
        ({"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"], "text_config": {}}, False),
        ({"model_type": "qwen2"}, False),
    ],
)
def test_config_json_tells_whether_mlx_left_out_towers(config: dict[str, Any], noted: bool, tmp_path: Path) -> None:
    tensors = {"language_model.model.norm.weight": np.ones(2, np.float32)}
    with open_checkpoint(of_mlx(tmp_path / "mlx", tensors, **config)) as checkpoint:
        assert len(checkpoint.notes) == noted


def test_a_text_model_without_its_towers_is_pointed_out(tmp_path: Path) -> None:
    folder = of_mlx(tmp_path / "mlx", {"language_model.model.norm.weight": np.ones(2, np.float32)}, "gemma3", text_config={})
    with open_checkpoint(folder) as checkpoint:
        (note,) = checkpoint.notes
    assert note.what == "only the text model is here: MLX has left out the parts for images or audio"
    tensors = {"language_model.model.norm.weight": np.ones(2, np.float32), "vision_tower.norm.weight": np.ones(2, np.float32)}
    with open_checkpoint(of_mlx(tmp_path / "whole", tensors, "gemma3", text_config={})) as checkpoint:
        assert checkpoint.notes == ()
