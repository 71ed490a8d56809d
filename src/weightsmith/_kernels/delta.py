"""Deltas in bytes and in whole matrices: copied out of the inputs, added in, measured, and rescaled.

Squares and sums are float64, by grain and in lanes, so that no norm depends on how a tensor was cut into tiles. A difference is
rounded to the row's dtype before it is squared: that is the delta that merge methods see.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weightsmith._kernels.codecs import BF16, BF16_IN, BLOCK, OTHER_IN, Encoded, EncodedInputs, as_float, decode, encode
from weightsmith._kernels.combine import LANES, add_products, add_scaled, fill, narrow, subtract, sum_lanes
from weightsmith._kernels.jit import kernel


@kernel(inputs_codes="in", merged_code="in")
def delta_squares(
    inputs: EncodedInputs,
    n: int,
    grain: int,
    weights: np.ndarray,
    merged: Encoded,
    out: np.ndarray,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Squared norms by grain: of merged - base, of Σ weights · delta, of each delta.

    inputs  the base, then the models; merged: n elements of the result
    out     float64 [grains, 2 + models]
    rows    scratch [2, BLOCK]; sums float64 [3 + models, BLOCK] scratch
    """
    raw, codes = inputs
    models = weights.size
    base, x, total = rows[0], rows[1], sums[2 + models]
    for g in range(out.shape[0]):
        end = min(n, (g + 1) * grain)
        for s in range(2 + models):
            fill(sums[s], LANES, 0.0)
        for start in range(g * grain, end, BLOCK):
            m = min(BLOCK, end - start)
            decode(raw[0], codes[0], start, m, base)
            decode(merged.data, merged.code, start, m, x)
            subtract(x, base, m)
            add_products(x, x, m, sums[0])
            fill(total, m, 0.0)
            for i in range(models):
                decode(raw[i + 1], codes[i + 1], start, m, x)
                subtract(x, base, m)
                add_products(x, x, m, sums[2 + i])
                add_scaled(weights[i], x, m, total)
            add_products(total, total, m, sums[1])
        for s in range(2 + models):
            out[g, s] = sum_lanes(sums[s])


@kernel(inputs_codes="in", merged_code="in", out_code="out")
def rescale_delta(
    inputs: EncodedInputs,
    merged: Encoded,
    n: int,
    factor: float,
    out: Encoded,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """out = base + factor · (merged - base), in float64, rounded once; arguments as for `delta_squares`."""
    raw, codes = inputs
    base, x, total = rows[0], rows[1], sums[0]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[0], codes[0], start, m, base)
        decode(merged.data, merged.code, start, m, x)
        fill(total, m, 0.0)
        add_scaled(1.0 - factor, base, m, total)
        add_scaled(factor, x, m, total)
        narrow(total, m, x)
        encode(x, m, out.code, start, out.data)


@kernel
def add_squares(base: np.ndarray, out: np.ndarray, moved: np.ndarray, whole: np.ndarray) -> None:
    """moved[j % LANES] += (out[j] - base[j])² and whole[j % LANES] += base[j]², of bf16 as uint16: in one loop."""
    squares, norms = moved[:LANES], whole[:LANES]
    end = base.size - base.size % LANES
    for start in range(0, end, LANES):
        b, o = base[start : start + LANES], out[start : start + LANES]
        for j in range(LANES):
            x = as_float(np.uint32(b[j]) << np.uint32(16))
            d = np.float64(as_float(np.uint32(o[j]) << np.uint32(16)) - x)
            squares[j] += d * d
            norms[j] += np.float64(x) * np.float64(x)
    for j in range(base.size - end):
        x = as_float(np.uint32(base[end + j]) << np.uint32(16))
        d = np.float64(as_float(np.uint32(out[end + j]) << np.uint32(16)) - x)
        squares[j] += d * d
        norms[j] += np.float64(x) * np.float64(x)


@kernel(base_code="in", out_code="in")
def distance(base: Encoded, out: Encoded, n: int, grain: int, totals: np.ndarray, rows: np.ndarray, sums: np.ndarray) -> None:
    """totals[g] (float64 [grains, 2]) = Σ (out - base)² and Σ base² over grain g, of n elements each.

    rows scratch [2, BLOCK], float32 if both are bf16: a difference is rounded to its dtype. sums float64 [2, >= LANES] scratch
    """
    for g in range(totals.shape[0]):
        fill(sums[0], LANES, 0.0)
        fill(sums[1], LANES, 0.0)
        first, end = g * grain, min(n, (g + 1) * grain)
        if BF16_IN and base.code == BF16 and out.code == BF16:
            add_squares(base.data.view(np.uint16)[first:end], out.data.view(np.uint16)[first:end], sums[0], sums[1])
        elif OTHER_IN:
            for start in range(first, end, BLOCK):
                m = min(BLOCK, end - start)
                decode(base.data, base.code, start, m, rows[0])
                decode(out.data, out.code, start, m, rows[1])
                add_products(rows[0], rows[0], m, sums[1])
                subtract(rows[1], rows[0], m)
                add_products(rows[1], rows[1], m, sums[0])
        totals[g, 0] = sum_lanes(sums[0])
        totals[g, 1] = sum_lanes(sums[1])


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
    inputs: EncodedInputs,
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
def add_matrix_product(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """out += left @ right: float64 [n, k], [k, cols] and [n, cols], contiguous.

    Each element is a sum over k, in order: it does not depend on n, as a matrix product of a BLAS would.
    """
    for i in range(left.shape[0]):
        for k in range(left.shape[1]):
            add_scaled(left[i, k], right[k], right.shape[1], out[i])


@kernel
def rotate_blocks(rows: np.ndarray, blocks: np.ndarray, out: np.ndarray) -> None:
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
