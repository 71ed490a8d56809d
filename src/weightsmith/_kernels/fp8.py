"""Rows to 8-bit floats with scales: float8_e4m3fn codes, and the factor that each block of them is multiplied by.

`quantise` divides in float32 and rounds to nearest even; what lies beyond ±448 becomes ±448, where a cast (`codecs.encode`)
gives NaN. NaN stays NaN.
"""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.codecs import BLOCK, E4M3, encode
from weightsmith._kernels.jit import kernel

LARGEST = np.float32(448)
"""The largest float8_e4m3fn."""


@kernel(known={"out": [E4M3]})
def quantise(rows: np.ndarray, cols: int, high: int, wide: int, scales: np.ndarray, codes: np.ndarray) -> None:
    """codes = rows / scales, block by block: divided in float32, held to ±448, rounded to nearest even.

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
