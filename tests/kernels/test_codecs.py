"""Codecs against ml_dtypes: every code of the small types, and every rounding case that float32 offers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsmith._base.tensors import DTYPES
from weightsmith._kernels.codecs import BLOCK, decode, encode

SMALL = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}


def all_codes(name: str) -> np.ndarray:
    width = DTYPES[name].itemsize
    return np.arange(1 << 8 * width, dtype=np.uint8 if width == 1 else np.uint16)


def same_values(a: np.ndarray, b: np.ndarray) -> None:
    """Equal bit for bit, any NaN counting as NaN."""
    nan = np.isnan(a)
    np.testing.assert_array_equal(nan, np.isnan(b))
    np.testing.assert_array_equal(a[~nan].view(np.uint32), b[~nan].view(np.uint32))


def encoded(values: np.ndarray, name: str) -> np.ndarray:
    raw = np.zeros(values.size * DTYPES[name].itemsize, np.uint8)
    encode(values, values.size, DTYPES[name].code, 0, raw)
    return raw.view(SMALL[name])


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("row", [np.float32, np.float64])
def test_decode_all_codes(name: str, row: type) -> None:
    codes = all_codes(name)
    out = np.full(codes.size, 7, row)
    decode(codes.view(np.uint8), DTYPES[name].code, 0, codes.size, out)
    same_values(out.astype(np.float32), codes.view(SMALL[name]).astype(np.float32))


@pytest.mark.parametrize("name", SMALL)
def test_encode_is_the_inverse_of_decode(name: str) -> None:
    codes = all_codes(name)
    values = codes.view(SMALL[name]).astype(np.float32)
    finite = ~np.isnan(values)
    back = encoded(values, name).view(codes.dtype)
    np.testing.assert_array_equal(back[finite], codes[finite])
    assert np.isnan(back[~finite].view(SMALL[name]).astype(np.float32)).all()


@pytest.mark.parametrize("name", SMALL)
def test_encode_rounds_to_nearest_even(name: str) -> None:
    with np.errstate(all="ignore"):
        check_rounding(name)


def check_rounding(name: str) -> None:
    values = np.sort(all_codes(name).view(SMALL[name]).astype(np.float64))
    values = values[np.isfinite(values)]
    middle = (values[1:] + values[:-1]) / 2
    top = values[-1] + (values[-1] - values[-2]) * np.array([0.25, 0.5, 0.75, 1, 2, 100])
    cases = np.concatenate([middle, np.nextafter(middle, 9e9), top, -top, [np.inf, -np.inf, np.nan, 0.0, -0.0]])
    for value in (
        cases,
        np.nextafter(cases.astype(np.float32), np.float32(9e9)),
        np.nextafter(cases.astype(np.float32), np.float32(-9e9)),
    ):
        single = value.astype(np.float32)
        same_values(encoded(single, name).astype(np.float32), single.astype(SMALL[name]).astype(np.float32))


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_encode_any_float32(name: str, bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(SMALL[name]).astype(np.float32)
    same_values(encoded(values, name).astype(np.float32), expected)


@pytest.mark.parametrize("name", ["F32", "F64"])
def test_wide_types_are_copied(name: str) -> None:
    dtype = DTYPES[name]
    values = np.random.default_rng(0).standard_normal(BLOCK + 5).astype(dtype.numpy)
    out = np.zeros(values.size, dtype.numpy)
    encode(values, values.size, dtype.code, 0, out.view(np.uint8))
    np.testing.assert_array_equal(out, values)


def test_only_the_asked_range_is_written() -> None:
    raw = np.full(20, 0xAB, np.uint8)
    encode(np.ones(3, np.float32), 3, DTYPES["BF16"].code, 2, raw)
    assert (raw[:4] == 0xAB).all()
    assert (raw[10:] == 0xAB).all()
    np.testing.assert_array_equal(raw[4:10].view(np.uint16), [0x3F80] * 3)
