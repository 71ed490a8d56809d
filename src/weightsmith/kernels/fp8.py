"""Rows to and from 8-bit floats with scales: float8_e4m3fn codes, and the factor that each block of them is multiplied by.

An element is code · scale, in float32. `quantise` divides in float32 and rounds to nearest even; what lies beyond ±448 becomes
±448, where a cast (`codecs.encode`) gives NaN. NaN stays NaN.
"""

from __future__ import annotations

import numpy as np

from weightsmith.kernels.codecs import BLOCK, E4M3, as_bits, as_float, decode, encode
from weightsmith.kernels.jit import kernel

LARGEST = np.float32(448)
"""The largest float8_e4m3fn."""


@kernel
def row_maxima(rows: np.ndarray, cols: int, maxima: np.ndarray) -> None:
    """maxima[i] = the largest magnitude of row i; a NaN does not count, and a row of NaNs gives 0.

    rows    float32 [n · cols]
    maxima  float32 [n]
    """
    for i in range(maxima.size):
        row = rows[i * cols : (i + 1) * cols]
        top = np.uint32(0)
        for j in range(cols):  # as integers: magnitudes sort like their bits, and a maximum of integers vectorises
            bits = np.uint32(as_bits(row[j]) & np.uint32(0x7FFFFFFF))
            bits = np.uint32(0) if bits > np.uint32(0x7F800000) else bits
            top = bits if bits > top else top
        maxima[i] = as_float(top)


@kernel(known={"out": [E4M3]})
def quantise(rows: np.ndarray, cols: int, scales: np.ndarray, codes: np.ndarray) -> None:
    """codes = rows / scales, row by row: divided in float32, held to ±448, rounded to nearest even.

    rows    float32 [n · cols]
    scales  float32 [n], positive
    codes   uint8 [n · cols]: float8_e4m3fn
    """
    quotients = np.empty(BLOCK, np.float32)
    for i in range(scales.size):
        scale = scales[i]
        for start in range(i * cols, (i + 1) * cols, BLOCK):
            m = min(BLOCK, (i + 1) * cols - start)
            row, block = rows[start : start + m], quotients[:m]
            for j in range(m):
                q = row[j] / scale
                q = LARGEST if q > LARGEST else q
                block[j] = -LARGEST if q < -LARGEST else q
            encode(block, m, E4M3, start, codes)


@kernel(known={"in": [E4M3]})
def dequantise(
    codes: np.ndarray,
    first: int,
    cols: int,
    scales: np.ndarray,
    scale_cols: int,
    block_rows: int,
    block_cols: int,
    out: np.ndarray,
) -> None:
    """out = elements first … first + out.size of a matrix [rows, cols] in blocks that have a scale each.

    codes       uint8 [out.size]: these elements, float8_e4m3fn
    scales      float32: of the blocks, scale_cols in a row, from the row of blocks that holds element `first`
    block_rows  rows of a block, block_cols columns; the last block of a row or column may be smaller
    out         float32 [n]: code · scale, rounded once
    """
    origin = first // cols // block_rows
    done = 0
    while done < out.size:
        i, j = (first + done) // cols, (first + done) % cols
        band = (i // block_rows - origin) * scale_cols
        end = done + min(out.size - done, cols - j)
        while done < end:
            block = j // block_cols
            m = min(end - done, (block + 1) * block_cols - j)
            values = out[done : done + m]
            decode(codes, E4M3, done, m, values)
            scale = scales[band + block]
            for e in range(m):
                values[e] = values[e] * scale
            done += m
            j += m
