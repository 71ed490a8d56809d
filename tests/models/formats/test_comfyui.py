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
from weightsmith._base.errors import FormatError, PlanError, UnknownName, Unsupported, WeightsmithError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._models.checkpoint import Checkpoint, open_checkpoint
from weightsmith._models.formats import find_encoding
from weightsmith._plans import plan_from_json

E4M3, E5M2, BF16 = (np.dtype(d) for d in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16))
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
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


@pytest.mark.parametrize("leftover", [json.dumps({"layers": {X: {"format": "float8_e4m3fn"}}}), "not JSON"])
def test_metadata_left_over_plain_weights_is_ignored(leftover: str, tmp_path: Path) -> None:
    metadata = {"_quantization_metadata": leftover}
    weight = {f"{X}.weight": numbers(8, 8)}
    with open_checkpoint(write_file(tmp_path / "m.safetensors", weight, metadata)) as checkpoint:
        assert checkpoint.quantised is None
        assert not checkpoint.decoded
        assert checkpoint.metadata == {}


SETTINGS = {"format": "float8_e4m3fn"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{X}.comfy_quant": text({"format": "awq_w4a16"})}, "in the format 'awq_w4a16' are not read, only float8_e4m3fn"),
        ({f"{X}.comfy_quant": text({"format": "asym_w4a8_int8"})}, "'asym_w4a8_int8' are not read"),
        ({f"{X}.comfy_quant": text({**SETTINGS, "convrot": True})}, "'float8_e4m3fn' that are rotated by 256 columns are not"),
        ({f"{X}.comfy_quant": text({**SETTINGS, "num_experts": 16})}, "its settings have 16 experts"),
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


# ---- tiles and rotations


def tiled(scales: np.ndarray) -> np.ndarray:
    """Scales where cuBLAS looks for them: its formula, one by one."""
    rows, groups = scales.shape
    high, wide = -(-rows // 128), -(-groups // 4)
    tiles = np.zeros(high * wide * 512, np.uint8)
    for row in range(rows):
        for group in range(groups):
            outer, inner = row % 128, group % 4
            tile = row // 128 * wide + group // 4
            tiles[512 * tile + outer % 32 * 16 + outer // 32 * 4 + inner] = scales.view(np.uint8)[row, group]
    return tiles.reshape(128 * high, 4 * wide)


def of_groups(scales: np.ndarray, width: int) -> np.ndarray:
    return np.repeat(scales.astype(np.float64), width, 1)


NIBBLES = RANDOM.integers(0, 256, (208, 80), np.uint8)
LOCAL, GLOBAL = numbers(208, 10, dtype=E4M3), numbers()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FLOAT4 = np.stack([NIBBLES >> 4, NIBBLES & 15], -1).reshape(208, 160)
NVFP4 = np.where(FLOAT4 > 7, -1, 1) * E2M1[FLOAT4 & 7] * (of_groups(LOCAL, 16) * GLOBAL)
MX_CODES, EXPONENTS = codes(E4M3, 160, 64), RANDOM.integers(120, 130, (160, 2)).astype(np.uint8)
MXFP8 = MX_CODES.astype(np.float64) * of_groups(2.0 ** (EXPONENTS.astype(np.float64) - 127), 32)
TILED: dict[str, tuple[dict[str, np.ndarray], np.ndarray]] = {
    "nvfp4": ({"weight": NIBBLES, "weight_scale": tiled(LOCAL).view(E4M3), "weight_scale_2": GLOBAL}, NVFP4),
    "nvfp4 as bytes": ({"weight": NIBBLES, "weight_scale": tiled(LOCAL), "weight_scale_2": GLOBAL[None]}, NVFP4),
    "nvfp4 in one line": ({"weight": NIBBLES, "weight_scale": tiled(LOCAL).reshape(-1), "weight_scale_2": GLOBAL}, NVFP4),
    "mxfp8": ({"weight": MX_CODES, "weight_scale": tiled(EXPONENTS)}, MXFP8),
    "mxfp8 of their own dtype": ({"weight": MX_CODES, "weight_scale": tiled(EXPONENTS).view(E8M0)}, MXFP8),
}


def tiled_model(tmp_path: Path, name: str, **changes: Any) -> Path:
    tensors: dict[str, Any] = {**TILED[name][0], "comfy_quant": text({"format": name.split()[0]}), **changes}
    return write_checkpoint(tmp_path, {**{f"{X}.{end}": array for end, array in tensors.items()}, **NORM})


@pytest.mark.parametrize("name", TILED)
def test_scales_are_read_in_the_order_of_tiles(name: str, tmp_path: Path) -> None:
    with open_checkpoint(tiled_model(tmp_path, name, input_scale=ONE, bias=np.ones(len(TILED[name][1]), BF16))) as model:
        want = TILED[name][1]
        assert np.allclose(model.read(f"{X}.weight"), want, rtol=1e-6, atol=0)
        some = np.empty((7, want.shape[1]), np.float32)
        start = 125 * want.shape[1] * 4
        model.source.read_into(f"{X}.weight", start, some.reshape(-1).view(np.uint8))
        assert np.allclose(some, want[125:132], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nvfp4", {"weight_scale": LOCAL}, r"is \[208, 10\], not tiles of \[256, 12\]"),
        ("nvfp4", {"weight_scale": tiled(LOCAL).astype(np.float32)}, "is F32, and only F8_E4M3, U8 are read"),
        ("nvfp4", {"weight_scale_2": numbers(2)}, r"is \[2\], not one number"),
        ("nvfp4", {"weight_scale_2": ONE.astype(BF16)}, "is BF16, and only F32 are read"),
        ("nvfp4", {"weight": NIBBLES[:200]}, "nvfp4 has multiples of 16"),
        ("nvfp4", {"weight": NIBBLES.view(np.int8)}, "only codes of U8 are read"),
        ("nvfp4", {"pre_quant_scale": ONE}, "is part of a weight that is not read"),
        ("nvfp4", {"bias": np.ones(200, BF16)}, r"is stored as \[208, 160\], and the weight is \[200, 160\]"),
        ("nvfp4", {"comfy_quant": text({"format": "nvfp4", "orig_shape": [208, 150]})}, r"and the weight is \[208, 150\]"),
        ("nvfp4", {"comfy_quant": text({"format": "nvfp4", "orig_shape": []})}, r"and the weight is \[\]"),
        ("nvfp4", {"comfy_quant": text({"format": "nvfp4", "orig_shape": 0})}, "and the weight is 0"),
        ("mxfp8", {"weight_scale": tiled(EXPONENTS)[:128]}, "not tiles of"),
        ("mxfp8", {"weight": MX_CODES[:, :48]}, "mxfp8 has multiples of 32"),
        ("mxfp8", {"weight": MX_CODES[None]}, "require"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(name: str, changes: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsmithError, match=message):
        open_checkpoint(tiled_model(tmp_path, name, **changes)).close()


def test_a_missing_factor_is_an_error(tmp_path: Path) -> None:
    folder = tiled_model(tmp_path, "nvfp4", weight_scale_3=ONE)
    names = {f"{X}.{end}": array for end, array in TILED["nvfp4"][0].items() if end != "weight_scale_2"}
    write_checkpoint(folder, {**names, f"{X}.comfy_quant": text({"format": "nvfp4"})})
    with pytest.raises(FormatError, match="weight_scale_2' is missing"):
        open_checkpoint(folder).close()


def regular(size: int) -> np.ndarray:
    """The regular Hadamard matrix over the square root of its size."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, four)
    return matrix / np.sqrt(size)


@pytest.mark.parametrize("scales", [numbers(128, 1), numbers(128), ONE], ids=["[rows, 1]", "[rows]", "one"])
@pytest.mark.parametrize(("size", "settings"), [(256, {}), (64, {"convrot_groupsize": 64}), (4, {"convrot_groupsize": 4})])
def test_rotated_integers_are_rotated_back(size: int, settings: dict[str, Any], scales: np.ndarray, tmp_path: Path) -> None:
    stated = {"format": "int8_tensorwise", "convrot": True, **settings}
    for where, stated_so in (("plain", stated), ("nested", {"format": stated.pop("format"), "params": stated})):
        tensors = {f"{X}.weight": INT8, f"{X}.weight_scale": scales, f"{X}.comfy_quant": text(stated_so), **NORM}
        if where == "plain":
            tensors[f"{X}.comfy_quant"] = text({"format": "int8_tensorwise", **stated})
        rotated = (INT8.astype(np.float64).reshape(128, -1, size) @ regular(size)).reshape(128, 256)
        with open_checkpoint(write_checkpoint(tmp_path / where, tensors)) as checkpoint:
            want = rotated * (scales.reshape(-1, 1) if scales.ndim else scales)
            assert np.allclose(checkpoint.read(f"{X}.weight"), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "scale", "message"),
    [
        ({"convrot_groupsize": 128}, ONE, "rotated by 128 columns are not read"),
        ({"convrot_groupsize": "256"}, ONE, "rotated by '256' columns are not read"),
        ({"convrot_groupsize": 0}, ONE, "rotated by 0 columns are not read"),
        ({"convrot_groupsize": None}, ONE, "rotated by None columns are not read"),
        ({"convrot_groupsize": 1024}, ONE, "its width must be a multiple"),
        ({}, numbers(128, 2, 1), "and a scale that of whole rows"),
    ],
)
def test_rotations_that_are_not_read_are_refused(
    settings: dict[str, Any], scale: np.ndarray, message: str, tmp_path: Path
) -> None:
    stated = {"format": "int8_tensorwise", "convrot": True, **settings}
    tensors = {f"{X}.weight": INT8, f"{X}.weight_scale": scale, f"{X}.comfy_quant": text(stated)}
    with pytest.raises(Unsupported, match=message):
        open_checkpoint(write_checkpoint(tmp_path, tensors)).close()


def test_experts_are_stacked(tmp_path: Path) -> None:
    stack, scales = codes(np.dtype(np.int8), 3, 16, 8), numbers(3, 16, 1)
    stated = {"format": "int8_tensorwise", "num_experts": 3}
    tensors = {f"{X}.weight": stack, f"{X}.weight_scale": scales, f"{X}.comfy_quant": text(stated), **NORM}
    with open_checkpoint(write_checkpoint(tmp_path, tensors)) as checkpoint:
        check(checkpoint, stack * scales.astype(np.float64))


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
        ("TensorWiseINT8Layout", "int8_tensorwise", {"per_channel": True, "convrot": True}),
        ("TensorCoreNVFP4Layout", "nvfp4", {}),
        ("TensorCoreMXFP8Layout", "mxfp8", {}),
    ],
)
def test_the_same_numbers_as_the_library_of_comfyui(
    layout: str, format_: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    kitchen = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    import torch

    with kitchen.registry.use_backend("eager"):
        weight = torch.randn(160, 256, generator=torch.Generator().manual_seed(0))
        quantised = kitchen.tensor.QuantizedTensor.from_float(weight, layout, **settings)
        want = quantised.dequantize().numpy()
        stored = {name: array.contiguous() for name, array in quantised.state_dict(f"{X}.weight").items()}
    tensors = {name: as_numpy(array) for name, array in stored.items()}
    tensors[f"{X}.comfy_quant"] = text({"format": format_, "convrot": settings.get("convrot", False)})
    with open_checkpoint(write_checkpoint(tmp_path, tensors)) as checkpoint:
        ours = checkpoint.read(f"{X}.weight")
        assert np.allclose(ours, want, atol=1e-6) if settings.get("convrot") else np.array_equal(ours, want)


def as_numpy(array: Any) -> np.ndarray:
    """A tensor of torch, whose small floats numpy does not know."""
    import torch

    small = {torch.float8_e4m3fn: E4M3, torch.float8_e8m0fnu: E8M0}
    return array.view(torch.uint8).numpy().view(small[array.dtype]) if array.dtype in small else array.numpy()


# ---- writing

BLOCK_WEIGHTS = {
    "flux": {
        **{
            f"double_blocks.{i}.{part}.weight": (8, 8)
            for i in range(2)
            for part in ("img_attn.qkv", "img_mod.lin", "txt_mlp.0")
        },
        **{f"single_blocks.{i}.linear1.weight": (24, 8) for i in range(3)},
    },
    "wan": {f"blocks.{i}.{part}.weight": (8, 8) for i in range(3) for part in ("self_attn.q", "cross_attn.o", "ffn.0")},
    "unet": {
        **{f"input_blocks.{i}.1.transformer_blocks.0.attn1.to_q.weight": (8, 8) for i in (4, 5, 7, 8)},
        **{f"middle_block.1.transformer_blocks.{i}.ff.net.0.proj.weight": (32, 8) for i in range(2)},
        **{f"output_blocks.{i}.1.transformer_blocks.0.attn2.to_k.weight": (8, 8) for i in range(3)},
    },
    "t5": {f"encoder.block.{i}.layer.0.SelfAttention.q.weight": (8, 8) for i in range(2)},
}
OTHER_WEIGHTS = {
    "flux": {
        **{f"{name}.weight": (8, 8) for name in ("img_in", "txt_in", "time_in.in_layer", "final_layer.linear")},
        "double_blocks.0.img_attn.norm.query_norm.scale": (8,),
    },
    "wan": {
        **{f"{name}.weight": (8, 8) for name in ("text_embedding.0", "text_embedding.2", "time_projection.1", "head.head")},
        "patch_embedding.weight": (8, 4, 1, 2, 2),
        "blocks.0.modulation": (1, 6, 8),
    },
    "unet": {
        **{f"{name}.weight": (8, 8) for name in ("time_embed.0", "time_embed.2", "label_emb.0.0", "label_emb.0.2")},
        **{f"output_blocks.{i}.0.emb_layers.1.weight": (8, 8) for i in range(3)},
        "input_blocks.4.1.proj_in.weight": (8, 8),
        "out.2.weight": (4, 8, 3, 3),
    },
    "t5": {
        "shared.weight": (20, 8),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": (32, 4),
        "encoder.final_layer_norm.weight": (8,),
    },
}
OTHER_PARTS = {
    **{f"conditioner.embedders.0.transformer.text_model.encoder.layers.{i}.mlp.fc1.weight": (8, 8) for i in range(2)},
    "first_stage_model.decoder.mid.attn_1.q.weight": (8, 8, 1, 1),
}
FORMATS = "comfyui-fp8", "comfyui-fp8-old"


def single_file(path: Path, family: str, *, checkpoint: bool = False, dtype: Any = BF16) -> dict[str, np.ndarray]:
    """A diffusion model, or a text encoder. checkpoint: with a VAE and a text encoder. Returns its tensors."""
    prefix = "model.diffusion_model." if checkpoint else ""
    shapes = {f"{prefix}{name}": shape for name, shape in {**BLOCK_WEIGHTS[family], **OTHER_WEIGHTS[family]}.items()}
    shapes |= OTHER_PARTS if checkpoint else {}
    random = np.random.default_rng(len(shapes))
    tensors = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    write_file(path, tensors, {"format": "pt", "modelspec.title": "T"})
    return tensors


def stored_in(folder: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(folder, raw=True) as model:
        return {name: model.read(name) for name in model}


def as_before(stored: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """What comfyui-fp8-old stores, from what comfyui-fp8 stores."""
    renamed = {name.replace(".weight_scale", ".scale_weight"): x for name, x in stored.items() if ".comfy_quant" not in name}
    return {**renamed, f"{prefix}scaled_fp8": np.zeros(2, E4M3)}


@pytest.mark.parametrize("checkpoint", [False, True], ids=["alone", "checkpoint"])
@pytest.mark.parametrize("family", ["flux", "wan", "unet", "t5"])
def test_the_matrices_of_blocks_are_written_as_scaled_floats(family: str, checkpoint: bool, tmp_path: Path) -> None:
    tensors = single_file(tmp_path / "m.safetensors", family, checkpoint=checkpoint)
    out = weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / "out", format="comfyui-fp8", fsync=False).out
    stored, prefix = stored_in(out), "model.diffusion_model." if checkpoint else ""
    encoded = {f"{prefix}{name}" for name in BLOCK_WEIGHTS[family]}
    assert {name.replace(".comfy_quant", ".weight") for name in stored if name.endswith(".comfy_quant")} == encoded
    for name, tensor in tensors.items():
        if name not in encoded:
            assert stored[name].dtype == tensor.dtype
            assert stored[name].tobytes() == tensor.tobytes()
            continue
        module = name.removesuffix(".weight")
        scale = (np.abs(tensor).max().astype(np.float32) / np.float32(448)).astype(BF16).astype(np.float32)
        assert stored[f"{module}.weight_scale"].shape == ()
        assert stored[f"{module}.weight_scale"] == scale
        assert json.loads(stored[f"{module}.comfy_quant"].tobytes()) == {"format": "float8_e4m3fn"}
        want = np.clip(tensor.astype(np.float32) / scale, -448, 448).astype(E4M3)
        assert stored[name].tobytes() == want.tobytes()
    assert len(stored) == len(tensors) + 2 * len(encoded)
    old = weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / "old", format="comfyui-fp8-old", fsync=False).out
    other, want_old = stored_in(old), as_before(stored, prefix)
    assert {name: x.tobytes() for name, x in other.items()} == {name: x.tobytes() for name, x in want_old.items()}
    assert not (out / "config.json").exists()
    assert not weightsmith.plan(
        {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "m.safetensors")}]}, quantize="comfyui-fp8"
    ).warnings


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read_and_written_again_as_the_same_bytes(name: str, tmp_path: Path) -> None:
    tensors = single_file(tmp_path / "m.safetensors", "flux")
    out = weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / "out", format=name, fsync=False).out
    with open_checkpoint(out / "model.safetensors") as model:
        assert list(model) == sorted(tensors) or set(model) == set(tensors)
        assert {model.natural_dtype(tensor).name for tensor in model} == {"BF16"}
    again = weightsmith.quantize(out / "model.safetensors", tmp_path / "again", format=name, fsync=False).out
    assert {n: x.tobytes() for n, x in stored_in(again).items()} == {n: x.tobytes() for n, x in stored_in(out).items()}


@pytest.mark.long
def test_a_merge_is_written_as_the_merge_quantised_afterwards(tmp_path: Path) -> None:
    for name in "ab":
        single_file(tmp_path / f"{name}.safetensors", "wan", dtype=BF16 if name == "a" else np.dtype(np.float16))
    models = [{"model": str(tmp_path / f"{name}.safetensors"), "parameters": {"weight": 0.5}} for name in "ab"]
    recipe = {"merge_method": "linear", "models": models, "dtype": "bfloat16"}
    at_once = weightsmith.merge(recipe, tmp_path / "out", quantize="comfyui-fp8-old", fsync=False).out
    plain = weightsmith.merge(recipe, tmp_path / "plain", fsync=False).out
    after = weightsmith.quantize(plain / "model.safetensors", tmp_path / "after", format="comfyui-fp8-old", fsync=False).out
    assert {n: x.tobytes() for n, x in stored_in(at_once).items()} == {n: x.tobytes() for n, x in stored_in(after).items()}


def test_a_plan_with_a_marker_comes_back_from_json(tmp_path: Path) -> None:
    single_file(tmp_path / "m.safetensors", "wan", checkpoint=True)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "m.safetensors")}]}
    plan = weightsmith.plan(recipe, quantize="comfyui-fp8-old")
    assert not plan.warnings
    marked = [step.encoding for step in plan.steps if step.family != step.encoding]
    assert marked == ["comfyui-fp8-old model.diffusion_model.scaled_fp8"]
    data = json.loads(json.dumps(plan.to_json()))
    assert plan_from_json(data).layout == plan.layout
    assert find_encoding(marked[0]).name == marked[0]
    for marker in ("../x", "model.weight", "net.model.scaled_fp8", "first_stage_model.scaled_fp8"):
        with pytest.raises(UnknownName, match="no setting"):
            find_encoding(f"comfyui-fp8-old {marker}")


def prefixed_file(path: Path, prefix: str, module: str, blocks: int = 4) -> None:
    names = [f"{prefix}{module}.{i}.{part}.weight" for i in range(blocks) for part in ("self_attn.q_proj", "mlp.up_proj")]
    write_file(path, {name: np.ones((16, 16), BF16) for name in [*names, f"{prefix}x_embedder.weight"]}, {})


@pytest.mark.parametrize(
    ("prefix", "module", "marker"),
    [
        ("net.", "blocks", "net."),
        ("model.", "double_layers", "model."),
        ("model.model.", "blocks", "model.model."),
        ("model.diffusion_model.", "blocks", "model.diffusion_model."),
        ("", "blocks", ""),
        ("model.", "layers", ""),
        ("model.language_model.", "layers", ""),
    ],
)
def test_the_marker_has_the_prefix_by_which_comfyui_reads_the_file(
    prefix: str, module: str, marker: str, tmp_path: Path
) -> None:
    prefixed_file(tmp_path / "m.safetensors", prefix, module)
    out = weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / "out", format="comfyui-fp8-old", fsync=False).out
    assert [name for name in stored_in(out) if name.endswith("scaled_fp8")] == [f"{marker}scaled_fp8"]
    with open_checkpoint(out / "model.safetensors") as model, open_checkpoint(tmp_path / "m.safetensors") as before:
        assert set(model) == set(before)
        name = f"{prefix}{module}.0.mlp.up_proj.weight"
        assert np.allclose(model.read(name), before.read(name).astype(np.float32), rtol=0.07)
    name = f"comfyui-fp8-old {marker}scaled_fp8"
    assert find_encoding(name).name == name


def test_a_marker_whose_place_cannot_be_told_is_refused(tmp_path: Path) -> None:
    """ComfyUI takes `net.` for the prefix of a model with six such names and more, else `model.`."""
    names = [f"blocks.{i}.self_attn.q_proj.weight" for i in range(4)] + [f"net.y.{i}.weight" for i in range(6)]
    write_file(tmp_path / "m.safetensors", {name: np.ones((16, 16), BF16) for name in names}, {})
    with pytest.raises(WeightsmithError, match=r"by the prefix 'net\.', and .* does not begin with it") as caught:
        weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / "out", format="comfyui-fp8-old", fsync=False)
    assert "Write comfyui-fp8." in str(caught.value)


def test_a_folder_with_config_json_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "m", {"blocks.0.q.weight": np.ones((8, 8), BF16)}, {"_class_name": "WanTransformer3DModel"}
    )
    with pytest.raises(PlanError, match="for single files of diffusion models and text encoders"):
        weightsmith.quantize(folder, tmp_path / "out", format="comfyui-fp8")


def test_a_vae_has_no_blocks(tmp_path: Path) -> None:
    write_file(tmp_path / "vae.safetensors", {"decoder.mid.attn_1.q.weight": np.ones((8, 8, 1, 1), BF16)}, {})
    with pytest.raises(PlanError, match="nothing can be stored as comfyui-fp8"):
        weightsmith.quantize(tmp_path / "vae.safetensors", tmp_path / "out", format="comfyui-fp8")


NEWER = "comfyui-int8", "comfyui-mxfp8", "comfyui-nvfp4"
SHAPES = {
    **{f"blocks.{i}.attn.q.weight": (224, 160) for i in range(3)},
    "blocks.0.mlp.up.weight": (384, 64),
    "blocks.1.mlp.up.weight": (32, 192),
    "blocks.0.attn.small.weight": (40, 48),
    "embed.weight": (64, 64),
}


def larger_file(path: Path) -> dict[str, np.ndarray]:
    """A diffusion model whose matrices have several tiles, and one whose rows and columns fill none."""
    random = np.random.default_rng(5)
    tensors = {name: (random.standard_normal(shape) * 0.1).astype(BF16) for name, shape in SHAPES.items()}
    tensors["blocks.0.mlp.up.weight"][3] = 0
    tensors["blocks.2.attn.q.weight"][:] = 0
    write_file(path, tensors, {})
    return tensors


def groups_of(weight: np.ndarray, size: int) -> np.ndarray:
    return weight.astype(np.float32).reshape(len(weight), -1, size)


def as_nvfp4(weight: np.ndarray) -> dict[str, np.ndarray]:
    """What comfyui-nvfp4 stores of a weight, by numpy."""
    parts = groups_of(weight, 16)
    factor = (np.abs(parts).max() / np.float32(2688)).astype(BF16).astype(np.float32) if parts.any() else np.float32(2**-7)
    local = np.minimum(np.abs(parts).max(-1) / np.float32(6) / factor, 448).astype(np.float32).astype(E4M3)
    scales = (local.astype(np.float32) * factor)[..., None]
    with np.errstate(all="ignore"):
        values = np.where(scales == 0, 0, parts / scales).reshape(weight.shape)
    nibbles = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return {"": nibbles[:, ::2] << 4 | nibbles[:, 1::2], "_scale": tiled(local).view(E4M3), "_scale_2": factor}


def as_mxfp8(weight: np.ndarray) -> dict[str, np.ndarray]:
    parts = groups_of(weight, 32)
    with np.errstate(all="ignore"):
        exponents = np.ceil(np.log2(np.abs(parts).max(-1) / np.float32(448))) + 127
    exponents = np.where(parts.any(-1), exponents, 1)
    values = np.clip(parts / np.exp2(exponents - 127).astype(np.float32)[..., None], -448, 448).astype(E4M3)
    return {"": values.reshape(weight.shape), "_scale": tiled(exponents.astype(np.uint8))}


def as_int8(weight: np.ndarray) -> dict[str, np.ndarray]:
    rows = weight.astype(np.float32)
    most = np.abs(rows).max(1, keepdims=True)
    scales = np.where(most == 0, np.float32(2**-7), (most / np.float32(127)).astype(BF16).astype(np.float32))
    return {"": np.clip(np.rint(rows / scales), -128, 127).astype(np.int8), "_scale": scales}


WANTED = {
    "comfyui-nvfp4": (as_nvfp4, 16, "nvfp4"),
    "comfyui-mxfp8": (as_mxfp8, 32, "mxfp8"),
    "comfyui-int8": (as_int8, 1, "int8_tensorwise"),
}


@pytest.mark.parametrize("name", NEWER)
def test_weights_are_written_as_numpy_encodes_them(name: str, tmp_path: Path) -> None:
    tensors, (encode, multiple, format_) = larger_file(tmp_path / "m.safetensors"), WANTED[name]
    out = weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / "out", format=name, fsync=False).out
    want: dict[str, np.ndarray] = {}
    for tensor, array in tensors.items():
        if not tensor.startswith("blocks.") or any(size % multiple for size in array.shape):
            want[tensor] = array
            continue
        want |= {f"{tensor}{end}": part for end, part in encode(array).items()}
        want[tensor.replace(".weight", ".comfy_quant")] = text({"format": format_})
    stored = stored_in(out)
    assert {n: (x.shape, x.dtype) for n, x in stored.items()} == {n: (x.shape, x.dtype) for n, x in want.items()}
    for tensor, array in want.items():
        assert stored[tensor].tobytes() == array.tobytes(), tensor


@pytest.mark.parametrize("name", NEWER)
def test_newer_formats_are_read_and_written_again_as_the_same_numbers(name: str, tmp_path: Path) -> None:
    larger_file(tmp_path / "m.safetensors")
    out = weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / "out", format=name, fsync=False).out
    again = weightsmith.quantize(out / "model.safetensors", tmp_path / "again", format=name, fsync=False).out
    with open_checkpoint(out) as model, open_checkpoint(again) as other:
        assert all(np.array_equal(model.read(tensor), other.read(tensor)) for tensor in model)


def test_weights_of_a_text_encoder_that_other_programs_join_are_mixed_without_a_warning(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in "qkv"]
    write_file(tmp_path / "m.safetensors", {name: np.ones((32, 32), BF16) for name in names}, {})
    recipe = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "m.safetensors")}]}
    plan = weightsmith.plan(recipe, quantize="comfyui-nvfp4", tensor_types=["q_proj=comfyui-fp8"])
    assert {step.encoding for step in plan.steps} == {"comfyui-fp8", "comfyui-nvfp4"}
    assert not plan.warnings


@pytest.mark.parametrize(
    "kept",
    [
        "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight",
        "transformer_blocks.0.attn2.to_k.weight",
        "transformer.layers.0.self_attn.to_qkv.weight",
    ],
)
def test_weights_whose_columns_comfyui_counts_keep_their_shape(kept: str, tmp_path: Path) -> None:
    names = [kept, kept.replace(".0.", ".1.") if "input_blocks" not in kept else kept.replace("attn2", "attn1")]
    write_file(tmp_path / "m.safetensors", {name: np.ones((32, 32), BF16) for name in names}, {})
    for name, shape in (("comfyui-nvfp4", (32, 16)), ("comfyui-mxfp8", (32, 32))):
        out = weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / name, format=name, fsync=False).out
        stored = stored_in(out)
        assert stored[kept].shape == (32, 32)
        assert stored[names[1]].shape == shape
        assert f"{names[1].removesuffix('.weight')}.comfy_quant" in stored


def test_formats_are_mixed_by_the_names_of_weights(tmp_path: Path) -> None:
    larger_file(tmp_path / "m.safetensors")
    types = [r"blocks\.0\.=plain", "mlp=comfyui-fp8", "embed=comfyui-int8"]
    recipe = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "m.safetensors")}]}
    with pytest.raises(PlanError, match="no weight that is quantised has a name that matches embed"):
        weightsmith.plan(recipe, quantize="comfyui-nvfp4", tensor_types=types)
    out = weightsmith.quantize(
        tmp_path / "m.safetensors", tmp_path / "out", format="comfyui-nvfp4", tensor_types=types[:2], fsync=False
    ).out
    stored = stored_in(out)
    stated = {n.removesuffix(".comfy_quant"): json.loads(x.tobytes())["format"] for n, x in stored.items() if "_quant" in n}
    assert stated == {
        **dict.fromkeys([f"blocks.{i}.mlp.up" for i in range(2)], "float8_e4m3fn"),
        **dict.fromkeys([f"blocks.{i}.attn.q" for i in (1, 2)], "nvfp4"),
    }


@pytest.mark.parametrize(("default", "other"), [("comfyui-fp8-old", "comfyui-nvfp4"), ("comfyui-nvfp4", "comfyui-fp8-old")])
def test_the_older_names_are_not_mixed_with_others(default: str, other: str, tmp_path: Path) -> None:
    larger_file(tmp_path / "m.safetensors")
    with pytest.raises(WeightsmithError, match="marks the whole file, and cannot be mixed with comfyui-nvfp4"):
        weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / "out", format=default, tensor_types=[f"mlp={other}"])


def test_all_weights_may_have_the_older_names_by_a_type(tmp_path: Path) -> None:
    larger_file(tmp_path / "m.safetensors")
    outs = [
        weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / name, format=name, tensor_types=types, fsync=False).out
        for name, types in (("comfyui-int8", [".=comfyui-fp8-old"]), ("comfyui-fp8-old", []))
    ]
    by_type, by_format = map(stored_in, outs)
    assert {name: x.tobytes() for name, x in by_type.items()} == {name: x.tobytes() for name, x in by_format.items()}


LAYOUTS = {
    "nvfp4": "TensorCoreNVFP4Layout",
    "mxfp8": "TensorCoreMXFP8Layout",
    "int8_tensorwise": "TensorWiseINT8Layout",
    "float8_e4m3fn": "TensorCoreFP8Layout",
}


@pytest.mark.parametrize("name", NEWER)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_library_of_comfyui_decodes_newer_formats(name: str, dtype: str, tmp_path: Path) -> None:
    """As `_load_quantized_module` of ComfyUI 0.38 loads a layer."""
    kitchen = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    import torch
    from safetensors.torch import load_file

    larger_file(tmp_path / "m.safetensors")
    out = weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / "out", format=name, fsync=False).out
    state = load_file(out / "model.safetensors")
    modules = [key.removesuffix(".comfy_quant") for key in state if key.endswith(".comfy_quant")]
    assert len(modules) >= 5
    with kitchen.registry.use_backend("eager"), open_checkpoint(out / "model.safetensors") as model:
        for module in modules:
            format_ = json.loads(state[f"{module}.comfy_quant"].numpy().tobytes())["format"]
            scale, codes_ = state[f"{module}.weight_scale"], state[f"{module}.weight"]
            parts = {"scale": scale}
            if format_ == "nvfp4":
                parts = {"scale": state[f"{module}.weight_scale_2"], "block_scale": scale.view(torch.float8_e4m3fn)}
            elif format_ == "mxfp8":
                parts = {"scale": scale.view(torch.float8_e8m0fnu)}
            layout = getattr(kitchen.tensor, LAYOUTS[format_])
            params = layout.Params(**parts, orig_dtype=getattr(torch, dtype), orig_shape=SHAPES[f"{module}.weight"])
            theirs = kitchen.tensor.QuantizedTensor(codes_, LAYOUTS[format_], params).dequantize()
            ours = torch.from_numpy(model.read(f"{module}.weight"))
            if (name, dtype) == ("comfyui-nvfp4", "bfloat16"):  # it rounds the product of two scales
                assert torch.allclose(theirs.float(), ours, rtol=2**-7, atol=0)
            else:
                assert torch.equal(theirs, ours.to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_library_of_comfyui_decodes_what_is_written(dtype: str, tmp_path: Path) -> None:
    """As ComfyUI's Linear loads it: the format from X.comfy_quant, the layout of the library, the dtype that it computes in."""
    kitchen = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    import torch
    from safetensors.torch import load_file

    tensors = single_file(tmp_path / "m.safetensors", "unet", checkpoint=True)
    out = weightsmith.quantize(tmp_path / "m.safetensors", tmp_path / "out", format="comfyui-fp8", fsync=False).out
    state, decoded = load_file(out / "model.safetensors"), 0
    layout = kitchen.tensor.TensorCoreFP8Layout
    with kitchen.registry.use_backend("eager"), open_checkpoint(out / "model.safetensors") as model:
        for name in tensors:
            module = name.removesuffix(".weight")
            if (settings := state.get(f"{module}.comfy_quant")) is None:
                continue
            assert json.loads(settings.numpy().tobytes())["format"] == "float8_e4m3fn"
            shape = tuple(state[name].shape)
            params = layout.Params(scale=state[f"{module}.weight_scale"], orig_dtype=getattr(torch, dtype), orig_shape=shape)
            theirs = kitchen.tensor.QuantizedTensor(state[name], "TensorCoreFP8Layout", params).dequantize()
            ours = torch.from_numpy(model.read(name)).to(getattr(torch, dtype))
            assert torch.equal(theirs, ours)
            decoded += 1
    assert decoded == len(BLOCK_WEIGHTS["unet"])
