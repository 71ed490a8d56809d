"""How far rows are from each other as distributions: the Kullback-Leibler divergence of their softmaxes.

Σ p log(p / q) is a small difference of large terms where p and q hardly differ: with fine-tunes it loses half the digits of
float64. Both sum to the same, so Σ q φ((p - q) / q) with φ(z) = (1 + z) log(1 + z) - z is the same number, and none of its
terms is negative. exp and log are series in loops that vectorise; np.exp and np.log are calls.
"""

from __future__ import annotations

from math import factorial

import numpy as np

from weightsmith._kernels.codecs import BLOCK, EncodedInputs, decode
from weightsmith._kernels.combine import LANES, add_products, fill, sum_lanes
from weightsmith._kernels.jit import kernel

NEAR = 0.015625
"""Rows that nowhere differ by more are compared by series of their difference, which take half the time."""

_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.4286068203094173e-06
_ROUND = 1.5 * 2.0**52  # added to a small number it leaves its nearest integer in the last bits

_EXP = tuple(1 / factorial(k) for k in range(14))
_GROWTH = _EXP[2:9]
_ARTANH = tuple(1 / k for k in range(3, 22, 2))
_PHI = tuple(1 / ((k + 1) * (k + 2)) for k in range(9))
"""Coefficients of e^r, of (e^d - 1 - d) / d², of (artanh s - s) / s³ by s², and of φ(-z) / z²."""


@kernel
def _polynomial(x: float, coefficients: tuple[float, ...]) -> float:
    """Σ coefficients[k] · x^k, by Horner's rule. The loop is unrolled."""
    total = coefficients[-1]
    for k in range(len(coefficients) - 2, -1, -1):
        total = coefficients[k] + x * total
    return total


@kernel
def largest(row: np.ndarray, n: int, lanes: np.ndarray) -> float:
    """The largest of row[:n], with +0 for -0; lanes float64 [LANES] of scratch."""
    tops = lanes[:LANES]
    fill(tops, LANES, -np.inf)
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        x = row[start : start + LANES]
        for j in range(LANES):
            v = np.float64(x[j])
            tops[j] = (v if v > tops[j] else tops[j]) + 0.0  # the sum for plain stores: see `or_zero`
    for j in range(n - whole):
        tops[j] = max(tops[j], np.float64(row[whole + j]))
    top = -np.inf
    for j in range(LANES):
        top = max(top, tops[j])
    return top


@kernel
def total_of(row: np.ndarray, n: int, lanes: np.ndarray) -> float:
    """Σ row[:n] (float64), lane by lane; lanes float64 [LANES] of scratch."""
    sums = lanes[:LANES]
    fill(sums, LANES, 0.0)
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        x = row[start : start + LANES]
        for j in range(LANES):
            sums[j] += x[j]
    for j in range(n - whole):
        sums[j] += row[whole + j]
    return sum_lanes(sums)


@kernel
def exponentials(row: np.ndarray, n: int, shift: float, out: np.ndarray) -> None:
    """out[:n] = exp(row[:n] - shift) (float64, to 2 ulp; 0 below e^-700), where row <= shift.

    2^k · e^r with |r| <= ln 2 / 2 (Cody and Waite), e^r by its series to r¹³/13!.
    """
    x, y = row[:n], out[:n]
    for j in range(n):
        v = np.float64(x[j]) - shift
        v = v if v > -700.0 else np.float64(-700.0)
        t = v * _LOG2_E + _ROUND
        k = t - _ROUND
        r = (v - k * _LN2_HIGH) - k * _LN2_LOW
        e = _polynomial(r, _EXP)
        scale = np.uint64((np.float64(t).view(np.uint64) + np.uint64(1023)) << np.uint64(52)).view(np.float64)
        y[j] = e * scale


@kernel
def logarithms(row: np.ndarray, n: int) -> None:
    """row[:n] = log(row[:n]) (float64, normal and positive; to 2 ulp, and to 1e-16 near 1).

    m · 2^k with m from √½ to √2, and log m = 2 artanh((m - 1) / (m + 1)) by its series.
    """
    x = row[:n]
    for j in range(n):
        bits = np.float64(x[j]).view(np.uint64) + np.uint64(0x3FF0000000000000 - 0x3FE6A09E667F3BCD)
        exponent = np.uint64(bits >> np.uint64(52))
        m = np.uint64((bits & np.uint64(0xFFFFFFFFFFFFF)) + np.uint64(0x3FE6A09E667F3BCD)).view(np.float64)
        # The exponent as a number: in the last bits of 2^52, which is then taken away.
        k = np.uint64(exponent | np.uint64(0x4330000000000000)).view(np.float64) - (4503599627370496.0 + 1023.0)
        s = (m - 1.0) / (m + 1.0)
        z = s * s
        series = _polynomial(z, _ARTANH)
        x[j] = k * _LN2_HIGH + (2.0 * s + (2.0 * s * z * series + k * _LN2_LOW))


@kernel
def near_divergence(
    inputs: EncodedInputs,
    begin: int,
    n: int,
    top: float,
    epsilon: float,
    rows: np.ndarray,
    sums: np.ndarray,
    lanes: np.ndarray,
) -> float:
    """KL of elements begin … begin + n of raw[1] from those of raw[0], which differ by at most NEAR.

    With e = exp(base - top), g = exp(delta) - 1 and its mean, weighted by e: p - q is (e / Σ e)(g - mean) / (1 + mean). No
    small difference is taken of anything but g. top: the largest of the base; sums float64 [2, >= n] of scratch.
    """
    raw, codes = inputs
    power, growth = sums[0], sums[1]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[0], codes[0], begin + start, m, rows[0])
        decode(raw[1], codes[1], begin + start, m, rows[1])
        x, y, g = rows[0][:m], rows[1][:m], growth[start : start + m]
        exponentials(x, m, top, power[start:])
        for j in range(m):
            d = np.float64(y[j]) - np.float64(x[j])
            series = _polynomial(d, _GROWTH)
            g[j] = d + d * d * series
    e, g = power[:n], growth[:n]
    whole = total_of(e, n, lanes)
    fill(lanes, LANES, 0.0)
    add_products(e, g, n, lanes)
    mean = sum_lanes(lanes) / whole
    share, shrink = 1.0 / whole, 1.0 / (1.0 + mean)
    for j in range(n):
        soft = e[j] * share
        q = soft + epsilon
        z = soft * ((g[j] - mean) * shrink) / q
        series = _polynomial(-z, _PHI)
        e[j] = q * (z * z * series)
    return total_of(e, n, lanes)


@kernel
def far_divergence(
    inputs: EncodedInputs,
    begin: int,
    n: int,
    epsilon: float,
    rows: np.ndarray,
    sums: np.ndarray,
    lanes: np.ndarray,
) -> float:
    """As `near_divergence`, for any rows. sums float64 [3, >= n] of scratch."""
    raw, codes = inputs
    for i in range(2):
        top, soft = -np.inf, sums[i]
        for start in range(0, n, BLOCK):
            m = min(BLOCK, n - start)
            decode(raw[i], codes[i], begin + start, m, rows[0])
            top = max(top, largest(rows[0], m, lanes))
        for start in range(0, n, BLOCK):
            m = min(BLOCK, n - start)
            decode(raw[i], codes[i], begin + start, m, rows[0])
            exponentials(rows[0], m, top, soft[start:])
        whole = total_of(soft, n, lanes)
        for j in range(n):
            soft[j] = soft[j] / whole + epsilon
    q, p, logs = sums[0][:n], sums[1][:n], sums[2][:n]
    for j in range(n):
        logs[j] = p[j] / q[j]
    logarithms(logs, n)
    for j in range(n):
        logs[j] = p[j] * logs[j] - (p[j] - q[j])
    return total_of(logs, n, lanes)


@kernel(inputs_codes="in")
def row_divergence(
    inputs: EncodedInputs, n: int, cols: int, epsilon: float, out: np.ndarray, rows: np.ndarray, sums: np.ndarray
) -> None:
    """out[r] (float64) = KL(softmax(raw[1] row) + ε ‖ softmax(raw[0] row) + ε), for rows of `cols` elements.

    rows scratch [2, BLOCK]; sums float64 [4, >= cols and LANES] scratch
    """
    raw, codes = inputs
    lanes = sums[3][:LANES]
    for r in range(out.size):
        begin = r * cols
        m = min(n - begin, cols)
        top, apart = -np.inf, 0.0
        for start in range(0, m, BLOCK):
            part = min(BLOCK, m - start)
            decode(raw[0], codes[0], begin + start, part, rows[0])
            decode(raw[1], codes[1], begin + start, part, rows[1])
            top = max(top, largest(rows[0], part, lanes))
            x, y = rows[0][:part], rows[1][:part]
            for j in range(part):
                y[j] = abs(y[j] - x[j])
            apart = max(apart, largest(y, part, lanes))
        if apart <= NEAR:
            out[r] = max(near_divergence(inputs, begin, m, top, epsilon, rows, sums, lanes), 0.0)
        else:
            out[r] = max(far_divergence(inputs, begin, m, epsilon, rows, sums, lanes), 0.0)
