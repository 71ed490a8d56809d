"""What is done to a merged delta: its norm beside those of the inputs, and a factor on it."""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.codecs import BF16, BF16_IN, BLOCK, OTHER_IN, as_float, decode, encode
from weightsmith._kernels.combine import LANES, add_products, add_scaled, fill, narrow, subtract, sum_lanes
from weightsmith._kernels.jit import kernel
from weightsmith._kernels.records import Encoded, Inputs


@kernel(inputs_codes="in", merged_code="in")
def delta_squares(
    inputs: Inputs,
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
    inputs: Inputs,
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
