"""Rows to small codes with scales, and back: integers of 4 and 8 bits, floats of 4 (E2M1) and 8 (E4M3), and affine codes.

A group is a run of elements of one row that share a scale; a block has several rows. Codes are x / scale, divided in float32
and rounded to nearest even, and held to the range. A NaN becomes the code of 0, but stays NaN in 8-bit floats. Functions of
groups take flat rows, in which groups follow each other without gaps; of two 4-bit codes in a byte, the first is the low half.
"""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.codecs import BLOCK, E4M3, E4M3_VALUES, E5M2_VALUES, as_bits, as_float, encode
from weightsmith._kernels.jit import kernel

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""float32 [16]: the value of each 4-bit float."""

TABLES: dict[str, np.ndarray] = {
    "float8": E4M3_VALUES,
    "wide8": E5M2_VALUES,
    "float4": E2M1_VALUES,
    "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    "offset8": np.arange(-128, 128, dtype=np.float32),
    "offset4": np.arange(-8, 8, dtype=np.float32),
}
"""The value of each code, by kind: float32 [256] or [16]. `offset`: the code of an integer is the integer + 2^(bits - 1).
`wide8` is the 8-bit float of the wider range, E5M2."""

LARGEST = np.float32(448)
"""The largest float8_e4m3fn."""

_ROUND = np.float32(1.5 * 2.0**23)
"""Adding it and taking it away again rounds a small float32 to the nearest integer, ties to even: np.rint is a call, and a call
keeps a loop from vectorising."""


@kernel
def quantise_integers(rows: np.ndarray, group: int, scales: np.ndarray, bits: int, offset: int, codes: np.ndarray) -> None:
    """codes = rows / scales as integers of -2^(bits - 1) … 2^(bits - 1) - 1, plus `offset`.

    rows    float32 [n]
    group   elements that share a scale; even for 4 bits
    scales  float32 [n / group], positive
    bits    8 or 4
    codes   uint8 [n · bits / 8]: the low byte or half byte of each
    """
    low, high = np.float32(-(1 << (bits - 1))), np.float32((1 << (bits - 1)) - 1)
    whole = np.empty(group, np.uint8)
    for g in range(scales.size):
        scale, row = scales[g], rows[g * group : (g + 1) * group]
        for j in range(group):
            q = row[j] / scale  # a product with 1 / scale would be rounded twice, and decide some ties otherwise
            q = high if q > high else q
            q = low if q < low else q
            q = q if q == q else np.float32(0)  # NaN
            whole[j] = np.uint8(np.int32((q + _ROUND) - _ROUND) + np.int32(offset))
        _store(whole, bits, g * group, codes)


@kernel
def quantise_float4(rows: np.ndarray, group: int, scales: np.ndarray, codes: np.ndarray) -> None:
    """codes = rows / scales as E2M1: nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code.

    rows    float32 [n]
    group   elements that share a scale, an even number
    scales  float32 [n / group], positive
    codes   uint8 [n / 2]
    """
    whole = np.empty(group, np.uint8)
    for g in range(scales.size):
        scale, row = scales[g], rows[g * group : (g + 1) * group]
        for j in range(group):
            q = row[j] / scale
            a = abs(q)
            # Each comparison is with the middle of two neighbours; a tie goes to the even code, so every other one is >=.
            code = np.uint8(a > np.float32(0.25)) + np.uint8(a >= np.float32(0.75)) + np.uint8(a > np.float32(1.25))
            code += np.uint8(a >= np.float32(1.75)) + np.uint8(a > np.float32(2.5)) + np.uint8(a >= np.float32(3.5))
            code += np.uint8(a > np.float32(5))
            whole[j] = np.uint8(code) + (np.uint8(8) if q < np.float32(0) else np.uint8(0))
        _store(whole, 4, g * group, codes)


@kernel
def quantise_affine(rows: np.ndarray, group: int, scales: np.ndarray, biases: np.ndarray, bits: int, codes: np.ndarray) -> None:
    """codes = (rows - biases) / scales as integers of 0 … 2^bits - 1.

    rows            float32 [n]
    group           elements that share scale and bias; even for 4 bits
    scales, biases  float32 [n / group]; scales are not zero
    bits            8 or 4
    codes           uint8 [n · bits / 8]
    """
    high = np.float32((1 << bits) - 1)
    whole = np.empty(group, np.uint8)
    for g in range(scales.size):
        scale, bias, row = scales[g], biases[g], rows[g * group : (g + 1) * group]
        for j in range(group):
            q = (row[j] - bias) / scale
            q = high if q > high else q
            q = np.float32(0) if q < np.float32(0) else q
            q = q if q == q else np.float32(0)
            whole[j] = np.uint8(np.int32((q + _ROUND) - _ROUND))
        _store(whole, bits, g * group, codes)


@kernel
def _store(whole: np.ndarray, bits: int, first: int, codes: np.ndarray) -> None:
    """Codes of `whole`, from element `first` on."""
    if bits == 8:
        codes[first : first + whole.size] = whole
    else:
        for j in range(whole.size // 2):
            codes[first // 2 + j] = (whole[2 * j] & np.uint8(15)) | np.uint8(whole[2 * j + 1] << np.uint8(4))


@kernel(known={"out": [E4M3]})
def quantise_float8(rows: np.ndarray, cols: int, high: int, wide: int, scales: np.ndarray, codes: np.ndarray) -> None:
    """codes = rows / scales, block by block: divided in float32, held to ±448, rounded to nearest even.

    A cast (`codecs.encode`) gives NaN for what lies beyond ±448.

    rows    float32 [n · cols]: whole bands of `high` rows, the last of which may be shorter
    high    rows of a block, wide columns; the last block of a row or column may be smaller
    scales  float32: of the blocks, in row-major order; positive
    codes   uint8 [n · cols]: float8_e4m3fn
    """
    quotients = np.empty(BLOCK, np.float32)
    across = -(-cols // wide)
    for i in range(rows.size // cols):
        for b in range(across):
            scale, end = scales[i // high * across + b], min((b + 1) * wide, cols)
            for start in range(b * wide, end, BLOCK):
                m = min(BLOCK, end - start)
                first = i * cols + start
                row, block = rows[first : first + m], quotients[:m]
                for j in range(m):
                    q = row[j] / scale
                    q = LARGEST if q > LARGEST else q
                    block[j] = -LARGEST if q < -LARGEST else q
                encode(block, m, E4M3, first, codes)


@kernel
def block_maxima(rows: np.ndarray, cols: int, high: int, wide: int, maxima: np.ndarray) -> None:
    """The largest magnitude of each block of high by wide elements; a NaN does not count, and a block of NaNs gives 0.

    rows    float32 [n · cols]: whole bands of `high` rows, the last of which may be shorter
    maxima  float32 [ceil(n / high) · ceil(cols / wide)]
    """
    across = -(-cols // wide)
    maxima[:] = 0
    for i in range(rows.size // cols):
        for b in range(across):
            row = rows[i * cols + b * wide : i * cols + min((b + 1) * wide, cols)]
            at = i // high * across + b
            top = as_bits(maxima[at])
            for j in range(row.size):  # as integers: magnitudes sort like their bits, and a maximum of integers vectorises
                bits = np.uint32(as_bits(row[j]) & np.uint32(0x7FFFFFFF))
                bits = np.uint32(0) if bits > np.uint32(0x7F800000) else bits
                top = bits if bits > top else top
            maxima[at] = as_float(top)


@kernel
def group_extremes(rows: np.ndarray, group: int, lows: np.ndarray, highs: np.ndarray) -> None:
    """The smallest and the largest element of each group. A NaN does not count.

    rows         float32 [n]
    lows, highs  float32 [n / group]
    """
    for g in range(lows.size):
        row = rows[g * group : (g + 1) * group]
        low, high = np.float32(np.inf), np.float32(-np.inf)
        for j in range(group):
            low = row[j] if row[j] < low else low
            high = row[j] if row[j] > high else high
        lows[g], highs[g] = low, high


@kernel
def dequantise(
    codes: np.ndarray,
    table: np.ndarray,
    first: int,
    cols: int,
    scales: np.ndarray,
    across: int,
    high: int,
    wide: int,
    out: np.ndarray,
) -> None:
    """out = elements first … first + out.size of a matrix [rows, cols] in blocks that have a scale each.

    codes   uint8: of these elements. Of 4-bit codes from the byte that holds element `first`
    table   float32 [256], or [16] for 4-bit codes: the value of each
    scales  float32: of the blocks, `across` in a row, from the row of blocks that holds element `first`
    high    rows of a block, wide columns; the last block of a row or column may be smaller
    out     float32 [n]: value · scale, rounded once
    """
    origin = first // cols // high
    half, skipped = table.size == 16, first & 1
    done = 0
    while done < out.size:
        i, j = (first + done) // cols, (first + done) % cols
        band = (i // high - origin) * across
        end = done + min(out.size - done, cols - j)
        while done < end:
            block = j // wide
            m = min(end - done, (block + 1) * wide - j)
            scale = scales[band + block]
            if half:
                for e in range(done, done + m):
                    at = e + skipped
                    out[e] = table[(codes[at >> 1] >> np.uint8(4 * (at & 1))) & np.uint8(15)] * scale
            else:
                for e in range(done, done + m):
                    out[e] = table[codes[e]] * scale
            done += m
            j += m
