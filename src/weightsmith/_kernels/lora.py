"""A low-rank update of a matrix, any run of its elements at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weightsmith._kernels.codecs import BLOCK, decode
from weightsmith._kernels.combine import add_scaled, fill
from weightsmith._kernels.jit import kernel
from weightsmith._kernels.records import Encoded


class LowRank(NamedTuple):
    """scaling · left @ right: left float64 [rows, rank], right float32 [rank, cols]."""

    left: np.ndarray
    right: np.ndarray
    scaling: float


@kernel(weight_code="in")
def add_low_rank(
    weight: Encoded, first: int, n: int, update: LowRank, out: np.ndarray, row: np.ndarray, total: np.ndarray
) -> None:
    """out[:n] = elements first … first + n of W + update, W [rows, cols].

    weight  these elements of W
    out    float32 or float64
    row    float32 or float64 [BLOCK], total float64 [BLOCK]: scratch

    Each element is a float64 sum over the rank, in order, rounded once: it depends on neither `first` nor `n`, as a matrix
    product of a BLAS would.
    """
    left, right, scaling = update
    rank, cols = right.shape
    done = 0
    while done < n:
        i, j = (first + done) // cols, (first + done) % cols
        m = min(n - done, cols - j, BLOCK)
        decode(weight.data, weight.code, done, m, row)
        fill(total, m, 0.0)
        for k in range(rank):
            add_scaled(left[i, k], right[k, j : j + m], m, total)
        x, y, z = row[:m], total[:m], out[done : done + m]
        for e in range(m):
            z[e] = np.float64(x[e]) + scaling * y[e]
        done += m
