"""Matrices in blocks that share a scale: their largest magnitudes, and their elements from codes."""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.codecs import E4M3_VALUES, as_bits, as_float
from weightsmith._kernels.jit import kernel

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""float32 [16]: the value of each 4-bit float."""

TABLES: dict[str, np.ndarray] = {
    "float8": E4M3_VALUES,
    "float4": E2M1_VALUES,
    "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    "offset8": np.arange(-128, 128, dtype=np.float32),
    "offset4": np.arange(-8, 8, dtype=np.float32),
}
"""The value of each code, by kind: float32 [256] or [16]. `offset`: the code of an integer is the integer + 2^(bits - 1)."""


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
