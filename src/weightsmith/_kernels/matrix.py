"""Between tiles of bytes and whole matrices: deltas copied out of the inputs, a merged delta or a low-rank update added in."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weightsmith._kernels.codecs import BLOCK, decode, encode
from weightsmith._kernels.combine import add_scaled, fill, narrow, subtract
from weightsmith._kernels.jit import kernel
from weightsmith._kernels.records import Encoded, Inputs


@kernel(codes="in")
def copy_rows(raw: np.ndarray, codes: np.ndarray, n: int, start: int, deltas: bool, out: np.ndarray, rows: np.ndarray) -> None:
    """out[i, start : start + n] = the n elements of input i; with `deltas`, of input i + 1 minus input 0.

    raw, codes  uint8 [inputs, bytes] and int64 [inputs]
    out         float32 or float64 [inputs, elements], [inputs - 1, elements] with deltas; deltas are rounded to its dtype
    rows        scratch of the same dtype [>= 1, BLOCK]
    """
    first = 1 if deltas else 0
    for at in range(0, n, BLOCK):
        m = min(BLOCK, n - at)
        if deltas:
            decode(raw[0], codes[0], at, m, rows[0])
        for i in range(first, raw.shape[0]):
            place = out[i - first, start + at : start + at + m]
            decode(raw[i], codes[i], at, m, place)
            if deltas:
                subtract(place, rows[0], m)


@kernel(inputs_codes="in", out_code="out")
def combine_with(
    inputs: Inputs,
    coefficients: np.ndarray,
    update: np.ndarray,
    n: int,
    out: Encoded,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """out = update[:n] + Σ coefficients[i] · raw[i], accumulated in float64 and rounded once.

    An input whose coefficient is zero is not looked at. update is float32 or float64 [n]; the rest is as for `combine`.
    """
    raw, codes = inputs
    x, total = rows[0], sums[0]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        fill(total, m, 0.0)
        for i in range(raw.shape[0]):
            if coefficients[i] != 0.0:
                decode(raw[i], codes[i], start, m, x)
                add_scaled(coefficients[i], x, m, total)
        add_scaled(1.0, update[start : start + m], m, total)
        narrow(total, m, x)
        encode(x, m, out.code, start, out.data)


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


@kernel
def add_product(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """out += left @ right: float64 [n, k], [k, cols] and [n, cols], contiguous.

    Each element is a sum over k, in order: it does not depend on n, as a matrix product of a BLAS would.
    """
    for i in range(left.shape[0]):
        for k in range(left.shape[1]):
            add_scaled(left[i, k], right[k], right.shape[1], out[i])


@kernel
def rotate_rows(rows: np.ndarray, blocks: np.ndarray, out: np.ndarray) -> None:
    """out = rows @ a block-diagonal matrix: float64 [n, cols], contiguous; not in place.

    blocks  float64 [number, size, size]: the blocks in order, from the first again if cols has more; size divides cols

    Each element is a sum in the order of the columns.
    """
    size = blocks.shape[1]
    for i in range(rows.shape[0]):
        for start in range(0, rows.shape[1], size):
            block, total = blocks[(start // size) % blocks.shape[0]], out[i, start : start + size]
            fill(total, size, 0.0)
            for k in range(size):
                add_scaled(rows[i, start + k], block[k], size, total)
