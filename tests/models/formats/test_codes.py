"""Integers, 4-bit floats and affine codes: kernels against their numpy twins, encodings against their bounds and formats."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.kernels import reference
from weightsmith._base.errors import Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._kernels import codes
from weightsmith._models.formats import encodings
from weightsmith.abc.stored import Modules

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP = 128
ANY_FLOAT = st.integers(0, 2**32 - 1).map(lambda bits: np.uint32(bits).view(np.float32))


@st.composite
def groups(draw: st.DrawFn, group: int = 32, *, finite: bool = False) -> np.ndarray:
    """float32 [groups, group]: normal numbers of a drawn size, and drawn ones; often multiples of 1/8, where ties are."""
    n = draw(st.integers(1, 4))
    size = 10.0 ** draw(st.integers(-40, 36))
    rows = (np.random.default_rng(draw(st.integers(0, 99))).standard_normal((n, group)) * size).astype(np.float32)
    if draw(st.booleans()):
        rows = (np.rint(rows / np.float32(size) * 8) / 8).astype(np.float32)
    drawn = st.floats(-(2.0**120), 2.0**120, width=32) if finite else ANY_FLOAT
    head = draw(hnp.arrays(np.float32, (n, 4), elements=drawn))
    if draw(st.booleans()):
        rows[:, :4] = head
    return rows


SCALES = st.sampled_from([1.0, 0.5, 0.1, 2.0**-100, 3e30])


@pytest.mark.long
@settings(max_examples=30)
@given(groups(), SCALES, st.sampled_from([(8, 0), (8, 128), (4, 8)]))
def test_quantise_integers_is_its_twin(rows: np.ndarray, scale: float, how: tuple[int, int]) -> None:
    scales = np.full(len(rows), scale, np.float32)
    packed = np.zeros(rows.size * how[0] // 8, np.uint8)
    codes.quantise_integers(rows.reshape(-1), rows.shape[1], scales, *how, packed)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(packed, reference.quantise_integers(rows, scales, *how))


@pytest.mark.long
@settings(max_examples=30)
@given(groups(), SCALES)
def test_quantise_float4_is_its_twin(rows: np.ndarray, scale: float) -> None:
    scales = np.full(len(rows), scale, np.float32)
    packed = np.zeros(rows.size // 2, np.uint8)
    codes.quantise_float4(rows.reshape(-1), rows.shape[1], scales, packed)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(packed, reference.quantise_float4(rows, scales))


@pytest.mark.long
@settings(max_examples=30)
@given(groups(), SCALES, st.sampled_from([0.0, -1.5, 7.0]), st.sampled_from([4, 8]))
def test_quantise_affine_is_its_twin(rows: np.ndarray, scale: float, bias: float, bits: int) -> None:
    scales, biases = np.full(len(rows), -scale, np.float32), np.full(len(rows), bias, np.float32)
    packed = np.zeros(rows.size * bits // 8, np.uint8)
    codes.quantise_affine(rows.reshape(-1), rows.shape[1], scales, biases, bits, packed)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(packed, reference.quantise_affine(rows, scales, biases, bits))


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.sampled_from([4, 8]), st.integers(0, 99))
def test_group_costs_are_those_of_numpy(n: int, groups_of_row: int, group: int, bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, groups_of_row * group)).astype(np.float32)
    scales = np.exp(rng.standard_normal((n, groups_of_row)) - 2).astype(np.float32)
    zeros = rng.integers(0, 2**bits, scales.shape).astype(np.float32)
    costs, totals = rng.random(rows.shape[1]).astype(np.float32), np.empty(scales.shape)
    codes.group_costs(rows, group, scales, zeros, bits, costs, totals)
    flat = rows.reshape(-1, group), scales.reshape(-1), zeros.reshape(-1), bits
    expected = reference.group_costs(*flat, np.broadcast_to(costs, rows.shape).reshape(-1, group))
    np.testing.assert_allclose(totals.reshape(-1), expected, rtol=1e-12)


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 70), st.integers(1, 9), st.integers(1, 80), st.integers(0, 99))
def test_block_maxima_are_those_of_numpy(n: int, cols: int, high: int, wide: int, seed: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((n, cols)).astype(np.float32)
    rows[rows > 2.5] = np.nan
    maxima = np.empty(-(-n // high) * -(-cols // wide), np.float32)
    codes.block_maxima(rows.reshape(-1), cols, high, wide, maxima)
    np.testing.assert_array_equal(maxima, reference.block_maxima(rows, (high, wide)).reshape(-1))


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from(sorted(codes.TABLES)), st.integers(1, 9), st.integers(1, 40), st.data())
def test_dequantise_is_its_twin_in_any_range(kind: str, rows: int, half: int, data: st.DataObject) -> None:
    table, cols = codes.TABLES[kind], 2 * half
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    whole = rng.integers(0, len(table), (rows, cols)).astype(np.uint8)
    high, wide = data.draw(st.integers(1, rows)), data.draw(st.integers(1, cols))
    scales = rng.standard_normal((-(-rows // high), -(-cols // wide))).astype(np.float32)
    first = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(first, whole.size))
    bits = 8 if len(table) == 256 else 4
    stored = reference.packed(whole.reshape(-1), bits)[first * bits // 8 : -(-end * bits // 8)]
    values = np.zeros(end - first, np.float32)
    codes.dequantise(
        stored, table, first, cols, scales[first // cols // high :].reshape(-1), scales.shape[1], high, wide, values
    )
    np.testing.assert_array_equal(values, reference.dequantise(whole, table, scales, (high, wide)).reshape(-1)[first:end])


# ---- encodings


def stored(name: str, rows: np.ndarray, dtype: str = "F32", whole: float | None = None) -> list[np.ndarray]:
    """What an encoding stores for a matrix, encoded in one call."""
    spec, encoding = TensorSpec("x.weight", DTYPES[dtype], rows.shape), encodings()[name]
    outs = [np.zeros(out.nbytes, np.uint8) for out in encoding.outs(spec)]
    largest = np.abs(rows).max() if whole is None else whole
    encoding.encode(spec, rows, 0, outs, np.array([largest], np.float32))
    return [raw.view(out.dtype.numpy).reshape(out.shape) for raw, out in zip(outs, encoding.outs(spec), strict=True)]


def halves(packed: np.ndarray) -> np.ndarray:
    """4-bit codes [rows, cols] of bytes or words, the lowest bits first."""
    raw = packed.view(np.uint8).reshape(len(packed), -1)
    return np.stack([raw & 15, raw >> 4], -1).reshape(len(packed), -1)


def spread(scales: np.ndarray, cols: int) -> np.ndarray:
    return scales.astype(np.float64).repeat(cols // scales.shape[1], 1)


def decoded(name: str, rows: np.ndarray, dtype: str = "F32", whole: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales [rows, cols], float64, as the format is defined: no code of ours."""
    parts, cols = stored(name, rows, dtype, whole), rows.shape[1]
    if name == "int8":
        scales = spread(parts[1], cols)
        return parts[0].astype(np.float64) * scales, scales
    if name == "fp8-static":
        scales = np.broadcast_to(parts[1].astype(np.float64), rows.shape)
        return parts[0].astype(np.float64) * scales, scales
    if name == "fp8-block":
        scales = parts[1].astype(np.float64).repeat(128, 0)[: len(rows)].repeat(128, 1)[:, :cols]
        return parts[0].astype(np.float64) * scales, scales
    if name.startswith("w4a16"):
        scales = spread(parts[1], cols)
        assert parts[2].tolist() == list(rows.shape)
        return (halves(parts[0]).astype(np.float64) - 8) * scales, scales
    if name.startswith("w8a16"):
        scales = spread(parts[1], cols)
        return (parts[0].view(np.uint8).astype(np.float64) - 128) * scales, scales
    if name in ("nvfp4a16", "nvfp4"):
        scales = spread(parts[1], cols) / np.float64(parts[2][0])
        return E2M1[halves(parts[0])] * scales, scales
    if name == "mxfp4":
        scales = spread(2.0 ** (parts[1].astype(np.float64) - 127), cols)
        return E2M1[halves(parts[0])] * scales, scales
    if name == "mxfp8":
        scales = spread(2.0 ** (parts[1].astype(np.float64) - 127), cols)
        return parts[0].astype(np.float64) * scales, scales
    assert name.startswith("mlx")
    scales, biases = spread(parts[1], cols), spread(parts[2], cols)
    whole_codes = halves(parts[0]) if "4bit" in name else parts[0].view(np.uint8)
    return whole_codes * scales + biases, np.abs(scales)


Bound = Callable[[np.ndarray, np.ndarray], np.ndarray]
BOUNDS: dict[str, Bound] = {
    "fp8-static": lambda x, s: 2.0**-4 * x + 2.0**-10 * s,
    "fp8-block": lambda x, s: 2.0**-4 * x + 2.0**-10 * s,
    "int8": lambda x, s: s,
    "w4a16": lambda x, s: 0.53 * s,
    "w8a16": lambda x, s: s,
    "nvfp4a16": lambda x, s: np.maximum(s / 4, x / 3),
    "mxfp4": lambda x, s: np.maximum(s / 4, x / 5),
    "mxfp8": lambda x, s: 2.0**-4 * x + 2.0**-10 * s,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
@settings(max_examples=30)
@given(data=st.data())
def test_the_error_is_within_the_bound(name: str, data: st.DataObject) -> None:
    rows = data.draw(groups(GROUP, finite=True))
    values, scales = decoded(name, rows)
    error = np.abs(values - rows)
    slack = 1 + 2.0**-20  # the quotient is rounded to float32
    assert (error <= slack * BOUNDS[name](np.abs(rows).astype(np.float64), scales)).all()


@pytest.mark.long
@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=30)
@given(seed=st.integers(0, 999), size=st.sampled_from([1e-3, 1.0, 100.0]), shift=st.sampled_from([0, 0, 5, -0.3]))
def test_the_error_of_mlx_is_within_the_bound(bits: int, seed: int, size: float, shift: float) -> None:
    rows = ((np.random.default_rng(seed).standard_normal((3, 128)) + shift) * size).astype(BF16).astype(np.float32)
    values, scales = decoded(f"mlx-{bits}bit", rows, "BF16")
    assert (np.abs(values - rows) <= (1 + 2.0 ** (bits - 8)) * scales + 1e-30).all()


@pytest.mark.parametrize("name", [*BOUNDS, "mlx-4bit", "mlx-8bit"])
def test_zeros_are_zeros(name: str) -> None:
    values, scales = decoded(name, np.zeros((2, 128), np.float32))
    assert not values.any()
    assert np.isfinite(scales).all()
    assert (scales > 0).all()


def test_the_global_scale_is_that_of_the_largest_weight_of_the_set() -> None:
    rows = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    _, local, global_scale = stored("nvfp4a16", rows)
    _, joined, shared = stored("nvfp4a16", rows, whole=8.0)
    assert global_scale == np.float32(448 * 6) / np.abs(rows).max()
    assert shared == np.float32(448 * 6 / 8)
    assert local.astype(np.float32).max() == 448
    assert joined.astype(np.float32).max() < 448


def test_exponents_round_up_from_a_significand_of_seven_quarters() -> None:
    rows = np.zeros((1, 96), np.float32)
    rows[0, [0, 32, 64]] = 1.7, 1.75, 2**-140  # tiny groups have the smallest normal scale
    assert stored("mxfp4", rows)[1].tolist() == [[125, 126, 1]]
    assert stored("mxfp8", rows)[1].tolist() == [[119, 120, 1]]


@pytest.mark.parametrize(
    ("name", "group"),
    [("fp8-block", 128), ("w4a16", 128), ("w4a16-g32", 32), ("nvfp4a16", 16), ("mxfp4", 32), ("mxfp8", 32), ("mlx-4bit", 64)],
)
def test_widths_that_the_group_does_not_divide_are_refused(name: str, group: int) -> None:
    spec = TensorSpec("x.weight", DTYPES["BF16"], (4, group + group // 2))
    with pytest.raises(Unsupported, match=f"its width {group + group // 2} is not a multiple of {group}"):
        encodings()[name].outs(spec)


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "fp8-static", "fp8-block", "w4a16", "w8a16", "nvfp4a16", "nvfp4", "mxfp4", "mxfp8"])
def test_compressed_tensors_decompresses_to_the_same_numbers(name: str) -> None:
    """The format's own library, in float32, from the stored tensors alone."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    rows = (np.random.default_rng(1).standard_normal((192, 384)) * 0.02).astype(np.float32)
    rows[7] = 0
    outs = encodings()[name].outs(TensorSpec("x.weight", DTYPES["F32"], rows.shape))
    state = {}
    for out, array in zip(outs, stored(name, rows), strict=True):
        part = out.name.removeprefix("x.")
        if array.dtype == E4M3:
            state[part] = torch.tensor(array.view(np.uint8)).view(torch.float8_e4m3fn)
        else:
            state[part] = torch.tensor(array.astype(np.float32) if array.dtype == BF16 else array)
    (group,) = encodings()[name].config(Modules())["quantization_config"]["config_groups"].values()
    scheme = QuantizationScheme(**{k: v for k, v in group.items() if k != "format"})
    back = BaseCompressor.get_value_from_registry(group["format"]).decompress(state, scheme)["weight"].float().numpy()
    expected, _ = decoded(name, rows)
    bound = 2.0**-8 if name in ("nvfp4a16", "nvfp4", "mxfp4") else 0  # it computes these in bfloat16
    np.testing.assert_allclose(back, expected.astype(np.float32), rtol=bound, atol=0)


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_dequantises_to_the_same_numbers(bits: int) -> None:
    """In float32, where its arithmetic is exact enough; with bfloat16 scales it rounds twice, in bfloat16."""
    mx = pytest.importorskip("mlx.core", reason="needs MLX")
    rows = (np.random.default_rng(1).standard_normal((32, 256)) * 0.02).astype(BF16).astype(np.float32)
    packed, scales, biases = stored(f"mlx-{bits}bit", rows, "BF16")
    parts = mx.array(packed), mx.array(scales.astype(np.float32)), mx.array(biases.astype(np.float32))
    back = np.array(mx.dequantize(*parts, group_size=64, bits=bits))
    expected, steps = decoded(f"mlx-{bits}bit", rows, "BF16")
    assert (np.abs(back - expected) <= 2.0**-16 * steps).all()
    theirs = mx.dequantize(*mx.quantize(mx.array(rows), group_size=64, bits=bits), group_size=64, bits=bits)
    assert np.linalg.norm(expected - rows) <= 1.05 * np.linalg.norm(np.array(theirs) - rows)
