"""Linear combinations, and the inner products their coefficients come from.

Coefficients are the same for a whole tensor, or differ by row or by column of a matrix.
"""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.codecs import BLOCK, Encoded, EncodedInputs, decode, encode
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
