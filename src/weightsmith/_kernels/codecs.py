"""Storage dtypes to and from rows of float32 (or float64), rounding to nearest even.

Every function reads or writes `n` elements of a byte buffer, beginning at element `start`, and switches on `DType.code`.
Every code of the 16-bit and 8-bit types is tested against ml_dtypes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from weightsmith._base.tensors import DTYPES
from weightsmith._kernels.jit import Switch, kernel

BLOCK = 2048
"""Elements in a row: a dozen rows of float64 stay in L2."""

F32, BF16, F16, E4M3, F64, E5M2 = (DTYPES[n].code for n in ("F32", "BF16", "F16", "F8_E4M3", "F64", "F8_E5M2"))

# What is read, and what is written.
F32_IN, BF16_IN, F16_IN, E4M3_IN, F64_IN, E5M2_IN = (Switch("in", [code]) for code in (F32, BF16, F16, E4M3, F64, E5M2))
F32_OUT, BF16_OUT, F16_OUT, E4M3_OUT, F64_OUT, E5M2_OUT = (Switch("out", [code]) for code in (F32, BF16, F16, E4M3, F64, E5M2))
OTHER_IN = Switch("in", [F32, F16, E4M3, F64, E5M2])
"""Some input is not BF16."""


def _table(bias: int, mantissa: int, *, has_inf: bool) -> np.ndarray:
    """float32 [256]: the value of each code of an 8-bit float."""
    codes = np.arange(256)
    magnitude, sign = codes & 127, np.where(codes & 128, -1.0, 1.0)
    exponent, fraction = magnitude >> mantissa, (magnitude & ((1 << mantissa) - 1)) / (1 << mantissa)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    top = magnitude >> mantissa == (127 >> mantissa)
    if has_inf:
        values = np.where(top, np.where(fraction == 0, np.inf, np.nan), values)
    else:
        values = np.where(magnitude == 127, np.nan, values)
    return (sign * values).astype(np.float32)


E4M3_VALUES = _table(7, 3, has_inf=False)
E5M2_VALUES = _table(15, 2, has_inf=True)


@kernel
def as_float(bits: Any) -> np.float32:
    """The float32 of these bits (numba widens uint32 arithmetic to uint64, so the cast back is needed)."""
    return np.uint32(bits).view(np.float32)


@kernel
def as_bits(value: Any) -> np.uint32:
    """The bits of float32(value)."""
    return np.float32(value).view(np.uint32)


@kernel
def or_zero(value: Any, keep: Any) -> Any:
    """`value` if `keep`, else +0, for loops that zero a row in place.

    Without the sum LLVM sees that a kept element is stored where it came from, stores the zeros alone, with a mask, and masked
    stores take five times as long on AMD. A kept -0 becomes +0.
    """
    return (value if keep else np.float32(0)) + np.float32(0)


@kernel(code="in")
def decode(raw: np.ndarray, code: int, start: int, n: int, row: np.ndarray) -> None:
    """row[:n] = elements start … start + n of the uint8 buffer `raw`; row is float32 or float64 [>= n]."""
    out = row[:n]
    if BF16_IN and code == BF16:
        bf16 = raw.view(np.uint16)[start : start + n]
        for j in range(n):
            out[j] = as_float(np.uint32(bf16[j]) << np.uint32(16))
    elif F32_IN and code == F32:
        f32 = raw.view(np.float32)[start : start + n]
        for j in range(n):
            out[j] = f32[j]
    elif F16_IN and code == F16:
        f16 = raw.view(np.uint16)[start : start + n]
        for j in range(n):
            h = np.uint32(f16[j])
            m = np.uint32(np.uint32(h & np.uint32(0x7FFF)) << np.uint32(13))
            # The exponent field is 112 too small. Subnormals are what exceeds the power of two that has their spacing: to
            # multiply instead would take a hundred cycles for each on Intel, as they are subnormal as float32 too.
            subnormal = as_bits(as_float(np.uint32(m + np.uint32(113 << 23))) - np.float32(2.0**-14))
            normal = np.uint32(m + np.uint32(112 << 23))
            normal = np.uint32(normal | np.uint32(0x7F800000)) if m >= np.uint32(31 << 23) else normal
            bits = subnormal if m < np.uint32(1 << 23) else normal
            out[j] = as_float(np.uint32(bits | np.uint32(np.uint32(h & np.uint32(0x8000)) << np.uint32(16))))
    elif F64_IN and code == F64:
        f64 = raw.view(np.float64)[start : start + n]
        for j in range(n):
            out[j] = f64[j]
    elif E4M3_IN and code == E4M3:
        for j in range(n):
            out[j] = E4M3_VALUES[raw[start + j]]
    elif E5M2_IN:
        for j in range(n):
            out[j] = E5M2_VALUES[raw[start + j]]


@kernel
def _round_bits(bits: np.uint32, bias: int, mantissa: int) -> np.uint32:
    """Magnitude code of a finite float32's magnitude bits in a smaller float; may carry into the overflow range."""
    drop = np.uint32(23 - mantissa)
    rebias = np.uint32((127 - bias) << 23)
    half = np.uint32((1 << (22 - mantissa)) - 1)
    shifted = np.uint32(bits - rebias)
    normal = np.uint32(np.uint32(shifted + half) + np.uint32(np.uint32(shifted >> drop) & np.uint32(1)))
    # Adding a power of two whose last bit is the subnormal spacing makes the FPU round to that spacing.
    magic = np.uint32((127 - bias + 24 - mantissa) << 23)
    subnormal = np.uint32(as_bits(as_float(bits) + as_float(magic)) - magic)
    return subnormal if bits < np.uint32(rebias + np.uint32(1 << 23)) else np.uint32(normal >> drop)


@kernel
def _smaller(u: np.uint32, bias: int, mantissa: int, most: int, top: int, nan: int, shift: int) -> np.uint32:
    """The code of a float32's bits in a smaller float.

    most   bits from which everything rounds to `top`; top: the largest code; nan: that of a NaN; shift: the sign's way down
    """
    magnitude = np.uint32(u & np.uint32(0x7FFFFFFF))
    code = min(_round_bits(min(magnitude, np.uint32(most)), bias, mantissa), np.uint32(top))
    code = np.uint32(nan) if magnitude > np.uint32(0x7F800000) else code
    return np.uint32(code | np.uint32(np.uint32(u & np.uint32(0x80000000)) >> np.uint32(shift)))


@kernel(code="out")
def encode(row: np.ndarray, n: int, code: int, start: int, raw: np.ndarray) -> None:
    """Elements start … start + n of the uint8 buffer `raw` = row[:n] (float32 or float64), rounded to nearest even.

    float64 rows go through float32 on their way to smaller types: at most 0.5 + 2^-13 ulp of bf16 or f16.
    """
    source = row[:n]
    if BF16_OUT and code == BF16:
        bf16 = raw.view(np.uint16)[start : start + n]
        for j in range(n):
            u = as_bits(source[j])
            # Half of the last kept bit less one, and one more if that bit is set: the carry rounds to nearest, ties to even,
            # also into the exponent, and past the largest number into infinity. A NaN may have its only set bits among those
            # that are dropped, and would become infinity: it is made quiet instead.
            last = np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(1))
            rounded = np.uint32(np.uint32(u + np.uint32(0x7FFF)) + last)
            quiet = np.uint32(u | np.uint32(0x400000))
            is_nan = np.uint32(u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            bf16[j] = np.uint16(np.uint32(quiet if is_nan else rounded) >> np.uint32(16))
    elif F32_OUT and code == F32:
        f32 = raw.view(np.float32)[start : start + n]
        for j in range(n):
            f32[j] = np.float32(source[j])
    elif F16_OUT and code == F16:
        f16 = raw.view(np.uint16)[start : start + n]
        for j in range(n):
            f16[j] = np.uint16(_smaller(as_bits(source[j]), 15, 10, 0x47800000, 0x7C00, 0x7E00, 16))
    elif F64_OUT and code == F64:
        f64 = raw.view(np.float64)[start : start + n]
        for j in range(n):
            f64[j] = source[j]
    elif E4M3_OUT and code == E4M3:
        e4m3 = raw[start : start + n]
        for j in range(n):  # 448 is the largest finite value and there is no infinity: what rounds past it is NaN (0x7F)
            e4m3[j] = np.uint8(_smaller(as_bits(source[j]), 7, 3, 0x44000000, 0x7F, 0x7F, 24))
    elif E5M2_OUT:
        e5m2 = raw[start : start + n]
        for j in range(n):
            e5m2[j] = np.uint8(_smaller(as_bits(source[j]), 15, 2, 0x47800000, 0x7C, 0x7E, 24))


@kernel
def _first_from(bits: np.ndarray, n: int, mask: Any, limit: Any) -> int:
    """Index of the first of bits[:n] that is at least `limit` under the mask; -1 when there is none.

    The largest first: that vectorises, and almost always is the whole answer.
    """
    x, kind = bits[:n], bits.dtype.type
    top = kind(0)
    for j in range(n):
        magnitude = kind(x[j] & mask)
        top = magnitude if magnitude > top else top
    if top >= limit:
        for j in range(n):
            if kind(x[j] & mask) >= limit:
                return j
    return -1


@kernel(codes="in")
def any_nonfinite(raw: np.ndarray, codes: np.ndarray, n: int) -> bool:
    """Whether a NaN or infinity is among n elements of any row of raw uint8 [inputs, >= bytes]. codes: int64 [inputs]."""
    for i in range(codes.shape[0]):
        if first_nonfinite(raw[i], codes[i], n) >= 0:
            return True
    return False


@kernel(code="in")
def first_nonfinite(raw: np.ndarray, code: int, n: int) -> int:
    """Index of the first NaN or infinity among n elements of a byte buffer; -1 when there is none."""
    if (BF16_IN or F16_IN) and (code == BF16 or code == F16):
        limit = np.uint16(0x7F80) if code == BF16 else np.uint16(0x7C00)
        return _first_from(raw.view(np.uint16), n, np.uint16(0x7FFF), limit)
    if F32_IN and code == F32:
        return _first_from(raw.view(np.uint32), n, np.uint32(0x7FFFFFFF), np.uint32(0x7F800000))
    if F64_IN and code == F64:
        return _first_from(raw.view(np.uint64), n, np.uint64(0x7FFFFFFFFFFFFFFF), np.uint64(0x7FF0000000000000))
    if E4M3_IN or E5M2_IN:
        return _first_from(raw, n, np.uint8(0x7F), np.uint8(0x7F) if code == E4M3 else np.uint8(0x7C))
    return -1


class EncodedInputs(NamedTuple):
    """One tile of the inputs: raw uint8 [inputs, >= bytes], and codes int64 [inputs], the `DType.code` of each."""

    raw: np.ndarray
    codes: np.ndarray


class Encoded(NamedTuple):
    """Elements of one tensor as they are stored: data uint8 [bytes], and the dtype's `DType.code`."""

    data: np.ndarray
    code: int
