"""Combinations whose coefficients differ by row or by column of a matrix."""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.codecs import BLOCK, decode, encode
from weightsmith._kernels.combine import add_scaled, fill, inner_products, narrow, subtract
from weightsmith._kernels.jit import kernel
from weightsmith._kernels.records import Encoded, Inputs


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
    inputs: Inputs,
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
    inputs: Inputs,
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
