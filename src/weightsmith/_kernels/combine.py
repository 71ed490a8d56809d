"""Sums over the inputs: linear combinations, and the inner products their coefficients come from; deltas, their norms, updates.

Coefficients are the same for a whole tensor, or differ by row or by column of a matrix. Squares and sums are float64, by grain
and in lanes, so that no norm depends on how a tensor was cut into tiles. A difference is rounded to the row's dtype before it
is squared: that is the delta that merge methods see.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weightsmith._kernels.codecs import BF16, BF16_IN, BLOCK, OTHER_IN, Encoded, EncodedInputs, as_float, decode, encode
from weightsmith._kernels.jit import kernel


@kernel
def fill(row: np.ndarray, n: int, value: float) -> None:
    """row[:n] = value."""
    for j in range(n):
        row[j] = value


@kernel
def set_scaled(coefficient: float, x: np.ndarray, n: int, total: np.ndarray) -> None:
    """total[:n] = coefficient * x[:n], in float64."""
    a, t = x[:n], total[:n]
    for j in range(n):
        t[j] = coefficient * np.float64(a[j])


@kernel
def narrow(total: np.ndarray, n: int, row: np.ndarray) -> None:
    """row[:n] = total[:n] in the row's dtype. A loop of its own: mixed with `encode`'s integer work it halves the speed."""
    t, r = total[:n], row[:n]
    for j in range(n):
        r[j] = t[j]


@kernel
def add_scaled(coefficient: float, x: np.ndarray, n: int, total: np.ndarray) -> None:
    """total[:n] += coefficient * x[:n], in float64."""
    a, t = x[:n], total[:n]
    for j in range(n):
        t[j] += coefficient * np.float64(a[j])


@kernel
def add_delta(delta: np.ndarray, factor: float, n: int, base: np.ndarray) -> None:
    """base[:n] += factor · delta[:n] (float64), rounded to the row's dtype."""
    b, d = base[:n], delta[:n]
    for j in range(n):
        b[j] = np.float64(b[j]) + factor * d[j]


@kernel(codes="in", out_code="out")
def combine(
    raw: np.ndarray,
    codes: np.ndarray,
    coefficients: np.ndarray,
    n: int,
    out: np.ndarray,
    out_code: int,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """out = Σ coefficients[i] · raw[i], accumulated in float64 and rounded once.

    raw           uint8 [models, bytes]; n elements of each are read
    codes         int64 [models], `DType.code`
    coefficients  float64 [models]
    out           uint8 [bytes]
    rows          float32 or float64 [>= 1, BLOCK] scratch; sums float64 [>= 1, BLOCK] scratch
    """
    x, total = rows[0], sums[0]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        for i in range(raw.shape[0]):
            decode(raw[i], codes[i], start, m, x)
            if i == 0:
                set_scaled(coefficients[i], x, m, total)
            else:
                add_scaled(coefficients[i], x, m, total)
        narrow(total, m, x)
        encode(x, m, out_code, start, out)


LANES = 64
"""Partial sums of a reduction. Enough to keep the FPU busy, few enough to stay in L1: three times as fast as a row of sums."""


@kernel
def add_products(a: np.ndarray, b: np.ndarray, n: int, lanes: np.ndarray) -> None:
    """lanes[j % LANES] += a[j] * b[j] for j < n, in float64 (the product of two float32 is exact)."""
    # The lane of an element depends on its place in its block, and blocks on the shape of the tensor alone. LLVM adds lanes
    # side by side, in vectors of any width, but may not change the order within one: that would need fastmath.
    sums = lanes[:LANES]
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        x, y = a[start : start + LANES], b[start : start + LANES]
        for j in range(LANES):
            sums[j] += np.float64(x[j]) * np.float64(y[j])
    for j in range(n - whole):
        sums[j] += np.float64(a[whole + j]) * np.float64(b[whole + j])


@kernel
def add_magnitudes(row: np.ndarray, n: int, lanes: np.ndarray) -> None:
    """lanes[j % LANES] += |row[j]| for j < n, in float64."""
    sums = lanes[:LANES]
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        x = row[start : start + LANES]
        for j in range(LANES):
            sums[j] += abs(np.float64(x[j]))
    for j in range(n - whole):
        sums[j] += abs(np.float64(row[whole + j]))


@kernel
def sum_lanes(lanes: np.ndarray) -> float:
    """Σ lanes[:LANES], one after the other."""
    total = 0.0
    for j in range(LANES):
        total += lanes[j]
    return total


@kernel
def subtract(x: np.ndarray, base: np.ndarray, n: int) -> None:
    """x[:n] -= base[:n]: the delta, rounded to the row's dtype."""
    a, b = x[:n], base[:n]
    for j in range(n):
        a[j] -= b[j]


@kernel
def inner_products(
    raw: np.ndarray,
    codes: np.ndarray,
    begin: int,
    end: int,
    deltas: bool,
    products: np.ndarray,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """found (float64 [pairs]) = inner products of elements begin … end of the inputs; see `gram`."""
    first = 1 if deltas else 0
    k = raw.shape[0]
    for p in range(products.size):
        fill(sums[p], LANES, 0.0)
    for start in range(begin, end, BLOCK):
        m = min(BLOCK, end - start)
        for i in range(k):
            decode(raw[i], codes[i], start, m, rows[i])
        if deltas:
            for i in range(1, k):
                subtract(rows[i], rows[0], m)
        p = 0
        for i in range(first, k):
            for j in range(i, k):
                add_products(rows[i], rows[j], m, sums[p])
                p += 1
    for p in range(products.size):
        products[p] = sum_lanes(sums[p])


@kernel(codes="in")
def gram(
    raw: np.ndarray,
    codes: np.ndarray,
    n: int,
    grain: int,
    deltas: bool,
    out: np.ndarray,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Inner products of the inputs, one set per grain of `grain` elements.

    deltas  True: raw[0] is a base, and the vectors are raw[1:] - raw[0]
    out     float64 [grains, pairs]; pairs (i, j) with i <= j in row order
    rows    scratch [models, BLOCK]; sums float64 [pairs, >= LANES] scratch
    """
    for g in range(out.shape[0]):
        inner_products(raw, codes, g * grain, min(n, (g + 1) * grain), deltas, out[g], rows, sums)


@kernel(codes="in")
def gram_rows(
    raw: np.ndarray,
    codes: np.ndarray,
    first: int,
    cols: int,
    deltas: bool,
    out: np.ndarray,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """As `gram`, one set of products for each row of `cols` elements: out float64 [rows, pairs], from row `first` on."""
    for r in range(out.shape[0]):
        inner_products(raw, codes, (first + r) * cols, (first + r + 1) * cols, deltas, out[r], rows, sums)


@kernel(inputs_codes="in", out_code="out")
def combine_rows(
    inputs: EncodedInputs,
    coefficients: np.ndarray,
    first: int,
    cols: int,
    out: Encoded,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """As `combine`, with coefficients float64 [rows, models]: one set for each row of `cols` elements, from row `first` on."""
    raw, codes = inputs
    x, total = rows[0], sums[0]
    for r in range(coefficients.shape[0]):
        end = (first + r + 1) * cols
        for start in range(end - cols, end, BLOCK):
            m = min(BLOCK, end - start)
            fill(total, m, 0.0)
            for i in range(raw.shape[0]):
                decode(raw[i], codes[i], start, m, x)
                add_scaled(coefficients[r, i], x, m, total)
            narrow(total, m, x)
            encode(x, m, out.code, start, out.data)


@kernel
def add_products_each(a: np.ndarray, b: np.ndarray, n: int, total: np.ndarray) -> None:
    """total[:n] += a[:n] * b[:n], in float64."""
    x, y, t = a[:n], b[:n], total[:n]
    for j in range(n):
        t[j] += np.float64(x[j]) * np.float64(y[j])


@kernel(codes="in")
def gram_columns(
    raw: np.ndarray, codes: np.ndarray, n: int, cols: int, deltas: bool, totals: np.ndarray, rows: np.ndarray
) -> None:
    """totals (float64 [pairs, cols]) += products of the inputs' elements, summed down each column, row after row."""
    first = 1 if deltas else 0
    k = raw.shape[0]
    for r in range(n // cols):
        for c in range(0, cols, BLOCK):
            m = min(BLOCK, cols - c)
            for i in range(k):
                decode(raw[i], codes[i], r * cols + c, m, rows[i])
            if deltas:
                for i in range(1, k):
                    subtract(rows[i], rows[0], m)
            p = 0
            for i in range(first, k):
                for j in range(i, k):
                    add_products_each(rows[i], rows[j], m, totals[p][c:])
                    p += 1


@kernel
def add_scaled_each(coefficients: np.ndarray, x: np.ndarray, n: int, total: np.ndarray) -> None:
    """total[:n] += coefficients[:n] * x[:n]."""
    c, a, t = coefficients[:n], x[:n], total[:n]
    for j in range(n):
        t[j] += c[j] * np.float64(a[j])


@kernel(inputs_codes="in", out_code="out")
def combine_columns(
    inputs: EncodedInputs,
    coefficients: np.ndarray,
    n: int,
    cols: int,
    out: Encoded,
    rows: np.ndarray,
    sums: np.ndarray,
) -> None:
    """As `combine`, with coefficients float64 [models, cols]: one set for each column."""
    raw, codes = inputs
    x, total = rows[0], sums[0]
    for r in range(n // cols):
        for c in range(0, cols, BLOCK):
            m = min(BLOCK, cols - c)
            fill(total, m, 0.0)
            for i in range(raw.shape[0]):
                decode(raw[i], codes[i], r * cols + c, m, x)
                add_scaled_each(coefficients[i][c:], x, m, total)
            narrow(total, m, x)
            encode(x, m, out.code, r * cols + c, out.data)


# ---- Deltas: copied out of the inputs, added in, measured, and rescaled


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
