"""ComfyUI's and musubi-tuner's scaled weights: the numbers that come out, in files and folders, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightsmith
from tests.mini import as_bytes, write_checkpoint
from weightsmith._base.errors import FormatError, PlanError, Unsupported, WeightsmithError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.checkpoint import Checkpoint, open_checkpoint

E4M3, E5M2, BF16 = (np.dtype(d) for d in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16))
RANDOM = np.random.default_rng(8)
X = "model.diffusion_model.blocks.0.attn.q"
NORM = {"model.diffusion_model.norm.weight": np.ones(8, BF16)}


def codes(dtype: np.dtype[Any], *shape: int) -> np.ndarray:
    values = RANDOM.integers(-100, 100, shape) if dtype == np.int8 else RANDOM.standard_normal(shape)
    return values.astype(dtype)


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RANDOM.uniform(0.01, 2, shape).astype(dtype)


def text(settings: object) -> np.ndarray:
    """The tensor that holds JSON."""
    return np.frombuffer(json.dumps(settings).encode(), np.uint8)


def write_file(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> Path:
    """A single safetensors file with metadata."""
    dtypes = {d.numpy: d for d in DTYPES.values()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    body = b""
    for name, array in tensors.items():
        spec = TensorSpec(name, dtypes[array.dtype], array.shape)
        offsets = [len(body), len(body) + spec.nbytes]
        header[name] = {"dtype": spec.dtype.name, "shape": list(spec.shape), "data_offsets": offsets}
        body += as_bytes(array)
    data = json.dumps(header).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data + body)
    return path


def check(checkpoint: Checkpoint, want: np.ndarray, dtype: str = "BF16") -> None:
    """The checkpoint has plain weights: those wanted, and the norm."""
    assert checkpoint.quantised is None
    assert checkpoint.decoded == "ComfyUI"
    assert list(checkpoint.specs) == [f"{X}.weight", *NORM]
    assert np.array_equal(checkpoint.read(f"{X}.weight"), want.astype(np.float32))
    assert checkpoint.natural_dtype(f"{X}.weight").name == dtype


Q8, Q5, INT8, CONV = codes(E4M3, 16, 128), codes(E5M2, 16, 128), codes(np.dtype(np.int8), 128, 256), codes(E4M3, 4, 3, 2, 2)
SQUARE = codes(E4M3, 128, 256)
ONE, EACH, GROUPS, BLOCKS = numbers(), numbers(16), numbers(16, 2, 1), numbers(2, 4)


def factors(scales: np.ndarray, like: np.ndarray) -> np.ndarray:
    """float64: the scale of each element of a matrix, from the scales of its blocks."""
    return np.kron(scales.astype(np.float64), np.ones([n // m for n, m in zip(like.shape, scales.shape, strict=True)]))


OLD: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {
    "one scale": (Q8, ONE, Q8 * np.float64(ONE)),
    "one scale [1]": (Q8, ONE[None], Q8 * np.float64(ONE)),
    "rows [rows]": (Q8, EACH, Q8 * EACH[:, None].astype(np.float64)),
    "rows [rows, 1]": (Q8, EACH[:, None], Q8 * EACH[:, None].astype(np.float64)),
    "groups of musubi-tuner": (Q8, GROUPS, Q8 * factors(GROUPS[:, :, 0], Q8)),
    "square blocks": (SQUARE, BLOCKS, SQUARE * factors(BLOCKS, SQUARE)),
    "E5M2": (Q5, ONE, Q5 * np.float64(ONE)),
    "a convolution": (CONV, ONE, CONV * np.float64(ONE)),
    "rows of a convolution": (CONV, EACH[:4, None, None, None], CONV * EACH[:4, None, None, None].astype(np.float64)),
}


MARKERS: list[dict[str, np.ndarray]] = [
    {},
    {"scaled_fp8": np.zeros(2, E4M3)},
    {"model.diffusion_model.scaled_fp8": np.zeros(0, E4M3)},
]


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("name", OLD)
def test_older_scaled_fp8_is_multiplied_by_its_scales(name: str, marker: dict[str, np.ndarray], tmp_path: Path) -> None:
    stored, scale, want = OLD[name]
    tensors = {f"{X}.weight": stored, f"{X}.scale_weight": scale, **NORM, **marker}
    with open_checkpoint(write_file(tmp_path / "m.safetensors", tensors, {"format": "pt"})) as checkpoint:
        check(checkpoint, want)
        assert checkpoint.config is None
        assert checkpoint.metadata == {"format": "pt"}
    with open_checkpoint(write_checkpoint(tmp_path / "m", tensors, {"model_type": "flux"})) as checkpoint:
        check(checkpoint, want)
        assert checkpoint.config == {"model_type": "flux"}


NEW: dict[str, tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray]] = {
    "float8_e4m3fn": ({"format": "float8_e4m3fn", "full_precision_matrix_mult": True}, Q8, ONE, Q8 * np.float64(ONE)),
    "bytes": ({"format": "float8_e4m3fn"}, Q8.view(np.uint8), ONE, Q8 * np.float64(ONE)),
    "float8_e5m2": ({"format": "float8_e5m2"}, Q5, ONE, Q5 * np.float64(ONE)),
    "rows": ({"format": "float8_e4m3fn_rowwise"}, Q8, EACH, Q8 * EACH[:, None].astype(np.float64)),
    "blocks": ({"format": "float8_e4m3fn_blockwise", "group_size": 64}, SQUARE, BLOCKS, SQUARE * factors(BLOCKS, SQUARE)),
    "int8": ({"format": "int8_tensorwise", "convrot": False}, INT8, ONE, INT8 * np.float64(ONE)),
    "int8 blocks": (
        {"format": "int8_blockwise", "params": {"group_size": 64}},
        INT8,
        BLOCKS,
        INT8 * factors(BLOCKS, INT8),
    ),
    "blocks of which the last is smaller": (
        {"format": "int8_blockwise", "group_size": 100},
        INT8,
        numbers(2, 3),
        INT8.astype(np.float64),
    ),
}
_, _, _SCALES, _ = NEW["blocks of which the last is smaller"]
NEW["blocks of which the last is smaller"][3][:] *= np.repeat(np.repeat(_SCALES.astype(np.float64), 100, 0), 100, 1)[:128, :256]


@pytest.mark.parametrize("place", ["tensors", "metadata", "metadata without the prefix"])
@pytest.mark.parametrize("name", NEW)
def test_the_format_is_read_from_tensors_and_from_metadata(name: str, place: str, tmp_path: Path) -> None:
    settings, stored, scale, want = NEW[name]
    tensors = {f"{X}.weight": stored, f"{X}.weight_scale": scale, f"{X}.input_scale": ONE, **NORM}
    metadata = {"modelspec.title": "T"}
    if place == "tensors":
        tensors[f"{X}.comfy_quant"] = text(settings)
    else:
        layer = X.removeprefix("model.diffusion_model.") if "without" in place else X
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": {layer: settings}})
    with open_checkpoint(write_file(tmp_path / "m.safetensors", tensors, metadata)) as checkpoint:
        check(checkpoint, want)
        assert checkpoint.config is None
        assert checkpoint.metadata == {"modelspec.title": "T"}
        assert ["1 scale(s) of activations" in note.what for note in checkpoint.notes] == [True]


@pytest.mark.parametrize(
    ("scale", "settings", "dtype"),
    [
        (ONE, {"orig_dtype": "torch.float16"}, "F16"),
        (ONE, {"orig_dtype": "torch.int8"}, "BF16"),
        (ONE.astype(np.float16), {}, "F16"),
        (ONE.astype(BF16), {"orig_dtype": "torch.float32"}, "F32"),
    ],
)
def test_a_merge_has_the_dtype_before_quantisation(
    scale: np.ndarray, settings: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    settings = {"format": "float8_e4m3fn", **settings}
    tensors = {f"{X}.weight": Q8, f"{X}.weight_scale": scale, f"{X}.comfy_quant": text(settings), **NORM}
    with open_checkpoint(write_checkpoint(tmp_path, tensors)) as checkpoint:
        check(checkpoint, Q8 * scale.astype(np.float64), dtype)


def test_models_of_both_kinds_are_merged_with_plain_ones(tmp_path: Path) -> None:
    old = {f"{X}.weight": Q8, f"{X}.scale_weight": ONE, f"{X}.scale_input": ONE, "scaled_fp8": np.zeros(2, E4M3), **NORM}
    new = {f"{X}.weight": Q8, f"{X}.weight_scale": EACH, f"{X}.comfy_quant": text({"format": "float8_e4m3fn"}), **NORM}
    files = [write_file(tmp_path / f"{name}.safetensors", t, {}) for name, t in (("old", old), ("new", new))]
    models = [{"model": str(path), "parameters": {"weight": 0.5}} for path in files]
    recipe = {"merge_method": "linear", "models": models, "out_dtype": "float32"}
    merged = weightsmith.merge(recipe, tmp_path / "out", progress=False)
    want = Q8.astype(np.float64) * (np.float64(ONE) + EACH[:, None]) / 2
    with open_checkpoint(merged.out) as checkpoint:
        assert list(checkpoint.specs) == [f"{X}.weight", *NORM]
        assert np.allclose(checkpoint.read(f"{X}.weight"), want, rtol=1e-6)


def test_8_bit_floats_without_a_scale_are_numbers(tmp_path: Path) -> None:
    tensors = {f"{X}.weight": Q8, f"{X}.scale_weight": ONE, "embed.weight": Q5, **NORM}
    with open_checkpoint(write_checkpoint(tmp_path, tensors)) as checkpoint:
        assert checkpoint.quantised is None
        assert np.array_equal(checkpoint.read("embed.weight"), Q5)


@pytest.mark.parametrize("left", [json.dumps({"layers": {X: {"format": "float8_e4m3fn"}}}), "not JSON"])
def test_metadata_left_over_plain_weights_is_ignored(left: str, tmp_path: Path) -> None:
    metadata = {"_quantization_metadata": left}
    weight = {f"{X}.weight": numbers(8, 8)}
    with open_checkpoint(write_file(tmp_path / "m.safetensors", weight, metadata)) as checkpoint:
        assert checkpoint.quantised is None
        assert not checkpoint.decoded
        assert checkpoint.metadata == {}


SETTINGS = {"format": "float8_e4m3fn"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{X}.comfy_quant": text({"format": "nvfp4"})}, "weights in the format 'nvfp4' are not read, only float8_e4m3fn"),
        ({f"{X}.comfy_quant": text({"format": "mxfp8"})}, "'mxfp8' are not read"),
        ({f"{X}.comfy_quant": text({"format": "int8_tensorwise", "convrot": True})}, "with 'convrot' True are not read"),
        ({f"{X}.comfy_quant": text({**SETTINGS, "params": {"smooth": 2}})}, "with 'smooth' 2 are not read"),
        ({f"{X}.comfy_quant": text({})}, "in the format None are not read"),
        ({f"{X}.comfy_quant": text([])}, "is not a JSON object"),
        ({f"{X}.comfy_quant": np.frombuffer(b"{a", np.uint8)}, "is not JSON"),
        ({f"{X}.comfy_quant": np.zeros(70_000, np.uint8)}, "not the bytes of a short JSON text"),
        ({f"{X}.comfy_quant": text({**SETTINGS, "group_size": -1})}, "group_size of .* is -1"),
        ({f"{X}.weight_scale": numbers(3)}, r"\[3\]: it is not one number for the weight, a row"),
        ({f"{X}.weight_scale": numbers(16, 3, 1)}, "it is not one number"),
        ({f"{X}.weight_scale": numbers(0)}, "it is not one number"),
        ({f"{X}.weight_scale": np.ones((16, 4), np.uint8)}, "is U8, and only F32, BF16, F16 are read"),
        ({f"{X}.weight": numbers(16, 128)}, "only codes of F8_E4M3, U8 are read"),
        ({f"{X}.weight": np.ones((), E4M3)}, "only codes of"),
        ({f"{X}.scale_weight": ONE}, "it has 2 scales"),
        ({f"{X}.weight_scale_2": ONE}, "is part of a weight that is not read"),
        ({f"{X}.pre_quant_scale": EACH}, "is part of a weight that is not read"),
        ({"other.weight": Q8, "other.weight_scale": ONE}, "'other.weight_scale' is part of a weight that is not read"),
        ({"other.comfy_quant": text(SETTINGS)}, "'other.weight' is missing"),
    ],
)
def test_what_is_not_read_is_refused(changes: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    tensors = {f"{X}.weight": Q8, f"{X}.weight_scale": ONE, f"{X}.comfy_quant": text(SETTINGS), **NORM, **changes}
    with pytest.raises((FormatError, Unsupported), match=message) as refused:
        open_checkpoint(write_checkpoint(tmp_path, tensors)).close()
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("[]", "_quantization_metadata in its metadata is not a JSON object"),
        ('{"layers": 1}', "layers in _quantization_metadata is 1"),
        (json.dumps({"layers": {"no.such": SETTINGS}}), "names 'no.such', and there is no tensor 'no.such.weight'"),
        (json.dumps({"layers": {X: 3}}), "are 3, not an object"),
        (json.dumps({"layers": {X: {"format": ["nvfp4"]}}}), "in the format"),
    ],
)
def test_metadata_that_is_wrong_is_refused(metadata: str, message: str, tmp_path: Path) -> None:
    tensors = {f"{X}.weight": Q8, f"{X}.weight_scale": ONE}
    path = write_file(tmp_path / "m.safetensors", tensors, {"_quantization_metadata": metadata})
    with pytest.raises(WeightsmithError, match=message):
        open_checkpoint(path).close()


def test_scales_without_a_format_are_refused(tmp_path: Path) -> None:
    """ComfyUI itself ignores X.weight_scale of weights whose format it does not know: what they are is not certain."""
    path = write_file(tmp_path / "m.safetensors", {f"{X}.weight": Q8, f"{X}.weight_scale": ONE}, {})
    with pytest.raises(PlanError, match="is quantised"):
        weightsmith.dequantize(path, tmp_path / "out", progress=False)


def test_the_same_numbers_as_torch_computes_from_codes_and_scales(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    stored = torch.from_numpy(Q8.view(np.uint8)).view(torch.float8_e4m3fn)
    want = (stored.float().view(16, 2, -1) * torch.from_numpy(GROUPS)).view(16, 128)
    with open_checkpoint(write_checkpoint(tmp_path, {f"{X}.weight": Q8, f"{X}.scale_weight": GROUPS})) as checkpoint:
        assert np.array_equal(checkpoint.read(f"{X}.weight"), want.numpy())


@pytest.mark.parametrize(
    ("layout", "format_", "settings"),
    [
        ("TensorCoreFP8Layout", "float8_e4m3fn", {}),
        ("TensorWiseINT8Layout", "int8_tensorwise", {}),
        ("TensorWiseINT8Layout", "int8_tensorwise", {"per_channel": True, "is_weight": True}),
    ],
)
def test_the_same_numbers_as_the_library_of_comfyui(
    layout: str, format_: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    kitchen = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    import torch

    with kitchen.registry.use_backend("eager"):
        weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        quantised = kitchen.tensor.QuantizedTensor.from_float(weight, layout, **settings)
        want = quantised.dequantize().numpy()
        stored = {name: array.contiguous() for name, array in quantised.state_dict(f"{X}.weight").items()}
    codes = stored.pop(f"{X}.weight")
    as_numpy = codes.view(torch.uint8).numpy().view(E4M3 if format_.startswith("float8") else np.int8)
    tensors = {f"{X}.weight": as_numpy, f"{X}.comfy_quant": text({"format": format_})}
    tensors |= {name: array.numpy() for name, array in stored.items()}
    with open_checkpoint(write_checkpoint(tmp_path, tensors)) as checkpoint:
        assert np.array_equal(checkpoint.read(f"{X}.weight"), want)
