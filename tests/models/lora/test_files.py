"""Adapters in single files without a config: every way to name them, where their scale is, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests.mini import write_checkpoint
from tests.models.lora.test_lora import CONFIG, H, P, Q, adapter, baked, base, factors, normal, refusal
from weightsmith._base.errors import PlanError, ShapeError
from weightsmith._models.lora.opening import METADATA_KEY

Arrays = dict[str, np.ndarray]

FLUX = "transformer_blocks.0.attn.to_q"
CLIP = "text_model.encoder.layers.0.self_attn.q_proj"


def model(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    tensors = {f"{module}.weight": normal(*shape, seed=7) for module, shape in shapes.items()}
    return write_checkpoint(folder, tensors, {"_class_name": "AnyModel"})


def pair(shape: tuple[int, ...], rank: int = 2, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a weight; of a kernel, as those of convolutions are."""
    rows, *cols = shape
    return normal(rank, *cols, seed=seed), normal(rows, rank, *[1] * (len(cols) - 1), seed=seed + 1)


def product(a: np.ndarray, b: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    matrix: np.ndarray = b.reshape(len(b), -1).astype(float) @ a.reshape(len(a), -1)
    return matrix.reshape(shape)


def check(folder: Path, file: Path, out: Path, changed: dict[str, np.ndarray]) -> None:
    """The model with a file applied is the model with these added."""
    with weightsmith.open_checkpoint(folder) as opened:
        before = {name: opened.read(name) for name in opened}
    weights = baked(folder, file, out)
    assert weights.keys() == before.keys()
    for name, array in before.items():
        want = array + changed.get(name.removesuffix(".weight"), 0)
        np.testing.assert_allclose(weights[name], want, rtol=1e-6, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("module", "a_end", "b_end", "name"),
    [
        (FLUX, ".lora_A.weight", ".lora_B.weight", f"transformer.{FLUX}"),
        (FLUX, ".lora_A.default.weight", ".lora_B.default.weight", f"transformer.{FLUX}"),
        (FLUX, ".lora_A", ".lora_B", f"transformer.{FLUX}"),
        (FLUX, ".lora.down.weight", ".lora.up.weight", f"transformer.{FLUX}"),
        (FLUX, ".lora_down.weight", ".lora_up.weight", f"diffusion_model.{FLUX}"),
        (FLUX, ".lora_down.weight", ".lora_up.weight", f"lora_transformer_{FLUX.replace('.', '_')}"),
        (FLUX, ".lora_down.weight", ".lora_up.weight", f"lycoris_{FLUX.replace('.', '_')}"),
        ("down_blocks.0.attn1.to_out.0", "_lora.down.weight", "_lora.up.weight", "unet.down_blocks.0.attn1.processor.to_out"),
        ("down_blocks.0.attn1.to_q", "_lora.down.weight", "_lora.up.weight", "unet.down_blocks.0.attn1.processor.to_q"),
        (CLIP, "_lora.down.weight", "_lora.up.weight", f"text_encoder.{CLIP.replace('q_proj', 'to_q')}"),
        (CLIP, ".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight", f"text_encoder.{CLIP}"),
    ],
)
def test_names_of_factors(module: str, a_end: str, b_end: str, name: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "base", {module: (6, 8), "proj_out": (6, 8)})
    a, b = pair((6, 8))
    save_file({f"{name}{a_end}": a, f"{name}{b_end}": b}, tmp_path / "a.safetensors")
    check(folder, tmp_path / "a.safetensors", tmp_path / "out", {module: product(a, b, (6, 8))})


@pytest.mark.parametrize("shape", [(6, 8, 1, 1), (6, 4, 3, 3), (6, 4, 3), (6, 2, 3, 3, 3)])
def test_convolutions(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = model(tmp_path / "base", {"down_blocks.0.conv": shape, "conv_in": shape})
    a, b = pair(shape)
    name = "lora_unet_down_blocks_0_conv"
    tensors = {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": np.float32([1])}
    save_file(tensors, tmp_path / "a.safetensors")
    check(folder, tmp_path / "a.safetensors", tmp_path / "out", {"down_blocks.0.conv": product(a, b, shape) / 2})


def test_factors_of_a_linear_layer_for_a_convolution_of_one_pixel(tmp_path: Path) -> None:
    """Stable Diffusion 1 has convolutions where SDXL has linear layers; trainers store factors of either."""
    folder = model(tmp_path / "base", {"mid_block.proj_in": (6, 8, 1, 1)})
    (a, b), name = pair((6, 8)), "unet.mid_block.proj_in"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, tmp_path / "a.safetensors")
    check(folder, tmp_path / "a.safetensors", tmp_path / "out", {"mid_block.proj_in": product(a, b, (6, 8, 1, 1))})


def diffusers_file(path: Path, stated: dict[str, Any] | None = None, alpha: float | None = None) -> Arrays:
    (a, b), name = pair((6, 8), 4), f"transformer.{FLUX}"
    tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    tensors |= {} if alpha is None else {f"{name}.alpha": np.array(alpha, np.float32)}
    metadata = {"format": "pt"} | ({} if stated is None else {METADATA_KEY: json.dumps(stated)})
    save_file(tensors, path, metadata=metadata)
    return {FLUX: product(a, b, (6, 8))}


PATTERNS = {
    "transformer.r": 8,
    "transformer.rank_pattern": {"attn.to_q": 4},
    "transformer.alpha_pattern": {"to_q": 6},
}
STATED = {"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.target_modules": ["to_q"]}


@pytest.mark.parametrize(
    ("stated", "alpha", "scaling"),
    [
        (None, None, 1.0),
        (None, 2.0, 0.5),
        (STATED, None, 2.0),
        (STATED | {"transformer.use_rslora": True}, None, 4.0),
        (STATED | PATTERNS, None, 1.5),
        ({"text_encoder.r": 9, "text_encoder.lora_alpha": 1}, None, 1.0),
    ],
)
def test_where_the_scale_is(stated: dict[str, Any] | None, alpha: float | None, scaling: float, tmp_path: Path) -> None:
    folder = model(tmp_path / "base", {FLUX: (6, 8)})
    added = diffusers_file(tmp_path / "a.safetensors", stated, alpha)
    check(folder, tmp_path / "a.safetensors", tmp_path / "out", {FLUX: scaling * added[FLUX]})


def test_an_alpha_may_be_an_integer(tmp_path: Path) -> None:
    """As kohya's scripts save one that nobody gave."""
    folder, path = model(tmp_path / "base", {FLUX: (6, 8)}), tmp_path / "a.safetensors"
    added = diffusers_file(path, alpha=2.0)
    tensors = {name: np.array(2, np.int64) if name.endswith(".alpha") else array for name, array in load_file(path).items()}
    save_file(tensors, path)
    check(folder, path, tmp_path / "out", {FLUX: added[FLUX] / 2})


def test_metadata_that_is_not_followed(tmp_path: Path) -> None:
    folder, path = model(tmp_path / "base", {FLUX: (6, 8)}), tmp_path / "a.safetensors"
    diffusers_file(path, STATED | {"transformer.r": 5})
    assert f"transformer.{FLUX} has rank 5 by the file's metadata, and factors of 4" in str(refusal(folder, path))
    diffusers_file(path, STATED | {"transformer.use_dora": True})
    assert "it is DoRA by its metadata" in str(refusal(folder, path))
    diffusers_file(path, STATED | {"transformer.init_lora_weights": "pissa"})
    assert "the base weights were changed before training" in str(refusal(folder, path))


def test_a_scale_that_is_in_no_file(tmp_path: Path) -> None:
    folder, path = base(tmp_path / "base", np.float32), tmp_path / "a.safetensors"
    save_file(factors(Q, H, H), path)
    problem = refusal(folder, path)
    assert "lora_alpha / r, their scale, is in no file" in problem.finding.what
    assert problem.finding.fix == "Name the folder that holds adapter_config.json beside it."
    plain = {name.removeprefix(P): array for name, array in factors(Q, H, H).items()}
    save_file(plain, path)
    assert "neither an alpha nor the name of a network" in str(refusal(folder, path))
    save_file({**plain, f"{Q}.alpha": np.array(8, np.float32)}, path)
    a, b = plain.values()
    check(folder, path, tmp_path / "out", {Q: 2 * product(a, b, (H, H))})


def test_peft_s_file_is_opened_with_the_config_beside_it(tmp_path: Path) -> None:
    folder, lora = base(tmp_path / "base", np.float32), adapter(tmp_path / "lora")
    want = baked(folder, lora, tmp_path / "one")
    weights = baked(folder, lora / "adapter_model.safetensors", tmp_path / "two")
    assert all((weights[name] == want[name]).all() for name in want)
    (lora / "adapter_model.bin").write_bytes(b"")
    assert "adapter_model.safetensors is beside it" in str(refusal(folder, lora / "adapter_model.bin"))


def test_folders_with_one_file(tmp_path: Path) -> None:
    folder = model(tmp_path / "base", {FLUX: (6, 8)})
    (tmp_path / "lora").mkdir()
    added = diffusers_file(tmp_path / "lora/my-style.safetensors")
    check(folder, tmp_path / "lora", tmp_path / "one", added)
    (tmp_path / "lora/my-style.safetensors").rename(tmp_path / "lora/pytorch_lora_weights.safetensors")
    diffusers_file(tmp_path / "lora/checkpoint-500.safetensors", alpha=1.0)
    check(folder, tmp_path / "lora", tmp_path / "two", added)  # as diffusers does
    (tmp_path / "lora/pytorch_lora_weights.safetensors").rename(tmp_path / "lora/checkpoint-1000.safetensors")
    assert "it has no adapter_config.json" in str(refusal(folder, tmp_path / "lora"))


def test_pytorch_s_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = model(tmp_path / "base", {FLUX: (6, 8)})
    a, b = pair((6, 8))
    name = f"lora_unet_{FLUX.replace('.', '_')}"
    tensors = {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": np.array(1, np.float32)}
    torch.save({key: torch.from_numpy(np.asarray(array)) for key, array in tensors.items()}, tmp_path / "a.pt")
    check(folder, tmp_path / "a.pt", tmp_path / "out", {FLUX: product(a, b, (6, 8)) / 2})


def flat(module: str, shape: tuple[int, ...] = (6, 8)) -> Arrays:
    a, b = pair(shape)
    return {f"{module}.lora_down.weight": a, f"{module}.lora_up.weight": b}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.norm.weight": normal(4)}, "a single file that is not a LoRA"),
        (flat("lora_unet_a") | {"lora_unet_b.alpha": np.array(1, np.float32)}, "1 tensor of it are neither factors nor alpha"),
        (flat("lora_unet_a") | {"lora_unet_a.lora_up.bias": normal(6)}, "1 tensor of it are neither factors nor alpha"),
        (flat("lora_unet_a") | flat("unet.b"), "it names modules in two ways, with dots and with _"),
        ({"lora_unet_a.lora_down.weight": normal(2, 8)}, "lora_unet_a has an A, 'lora_unet_a.lora_down.weight', and no B"),
        (flat("lora_unet_a") | {"lora_unet_a.lora_up.weight": normal(6, 3)}, "[2, 8] and [6, 3] are no factors"),
        (flat("lora_unet_a") | {"lora_unet_a.lora_up.weight": normal(6, 2, 3, 3)}, "are no factors"),
        (flat("lora_unet_a", (6, 4, 3, 3)) | {"lora_unet_a.lora_up.weight": normal(6, 2, 3, 3)}, "are no factors"),
        (flat("lora_unet_a") | {"lora_unet_a.lora_up.weight": np.ones((6, 2), np.int32)}, "I32 are no floating numbers"),
        (flat("lora_unet_a") | {"lora_unet_a.alpha": np.array(np.nan, np.float32)}, "alpha is nan"),
        (flat("lora_unet_a") | {"lora_unet_a.alpha": np.float32([1, 2])}, "is not one number"),
        (
            {"lora_unet_a.lora_down.weight": normal(2, 8), "lora_unet_a.lora_B.weight": normal(6, 2)},
            "are no factors of a linear layer",
        ),
    ],
)
def test_files_that_are_refused(tensors: Arrays, message: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "base", {"a": (6, 8), "b": (6, 8)})
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, tmp_path / "a.safetensors")
    assert message in str(refusal(folder, tmp_path / "a.safetensors"))


@pytest.mark.parametrize(("module", "shape"), [("c", (6, 8)), ("a", (6, 9)), ("a", (8, 6, 1, 1)), ("k", (6, 12, 1, 1))])
def test_files_that_do_not_fit(module: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = model(tmp_path / "base", {"mid.a": (6, 8), "mid.k": (12, 6, 1, 1)})
    save_file(flat(f"lora_unet_mid_{module}", shape), tmp_path / "a.safetensors")
    problem = refusal(folder, tmp_path / "a.safetensors")
    assert isinstance(problem, ShapeError)
    assert problem.finding.fix == "Name the base model that the adapter was trained on."


def test_one_matrix_under_two_names(tmp_path: Path) -> None:
    folder = model(tmp_path / "base", {"mid.a": (6, 8)})
    save_file(flat("lora_unet_mid_a") | flat("lora_transformer_mid_a"), tmp_path / "a.safetensors")
    assert "the adapter has factors for it under several names" in str(refusal(folder, tmp_path / "a.safetensors"))


def test_a_file_of_factors_is_no_model(tmp_path: Path) -> None:
    folder, path = model(tmp_path / "base", {"mid.a": (6, 8)}), tmp_path / "a.safetensors"
    save_file(flat("lora_unet_mid_a"), path)
    models = [{"model": str(source), "parameters": {"weight": 0.5}} for source in (path, folder)]
    with pytest.raises(PlanError) as caught:
        weightsmith.plan({"merge_method": "linear", "models": models})
    message = str(caught.value.problems[0])
    assert "an adapter (LoRA), not a model: factors of 1 module, such as 'lora_unet_mid_a'" in message
    with pytest.raises(PlanError, match="not a model"):
        weightsmith.dequantize(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shown = weightsmith.inspect(path)
    assert shown.adapter is not None
    assert shown.adapter.ranks == {2: 1}


def test_the_config_names_what_is_not_read(tmp_path: Path) -> None:
    """PEFT's checks are those of the folder."""
    folder, lora = base(tmp_path / "base", np.float32), adapter(tmp_path / "lora", **{**CONFIG, "peft_type": "GRALORA"})
    assert "peft_type" in str(refusal(folder, lora / "adapter_model.safetensors"))
