"""A low-rank update of a matrix, any run of its elements at a time."""

from __future__ import annotations

import numpy as np

from weightsmith.kernels.codecs import BLOCK, decode
from weightsmith.kernels.combine import add_scaled, fill
from weightsmith.kernels.jit import kernel


@kernel(code="in")
def add_low_rank(
    raw: np.ndarray,
    code: int,
    first: int,
    n: int,
    left: np.ndarray,
    right: np.ndarray,
    scaling: float,
    out: np.ndarray,
    row: np.ndarray,
    total: np.ndarray,
) -> None:
    """out[:n] = elements first … first + n of W + scaling · left @ right, W [rows, cols].

    raw    uint8: these elements of W, stored as `code`
    left   float64 [rows, rank]
    right  float32 [rank, cols]
    out    float32 or float64
    row    float32 or float64 [BLOCK], total float64 [BLOCK]: scratch

    Each element is a float64 sum over the rank, in order, rounded once: it depends on neither `first` nor `n`, as a matrix
    product of a BLAS would.
    """
    rank, cols = right.shape
    done = 0
    while done < n:
        i, j = (first + done) // cols, (first + done) % cols
        m = min(n - done, cols - j, BLOCK)
        decode(raw, code, done, m, row)
        fill(total, m, 0.0)
        for k in range(rank):
            add_scaled(left[i, k], right[k, j : j + m], m, total)
        x, y, z = row[:m], total[:m], out[done : done + m]
        for e in range(m):
            z[e] = np.float64(x[e]) + scaling * y[e]
        done += m
