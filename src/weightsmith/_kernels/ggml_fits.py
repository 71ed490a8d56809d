"""Fits of scales to groups of numbers, in the order of ggml's own additions: what `ggml.py` is made of.

ggml fits the scale of a group of 16 or 32 numbers by trying some twenty scales one after another. Each try adds up a few
products in order, so that one group cannot use a vector unit, and another order of additions would give other bytes. Here
`LANES` blocks are fitted side by side: lane v of every array belongs to block v, its additions have ggml's order, and all
lanes take the same steps. Where ggml branches on the numbers, a lane keeps its old value.

All arithmetic is float32 as written, nothing is fused. With importances the squares of errors are weighted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsmith._base.tensors import DTYPES
from weightsmith._kernels.codecs import decode, encode
from weightsmith._kernels.jit import kernel

LANES = 64
"""Blocks side by side: four vectors of 512 bits; what they need fits the caches."""

F16 = DTYPES["F16"].code
ZERO = np.float32(0)
ONE = np.float32(1)
TENTH = np.float32(0.1)
ROUND = np.float32(12582912)
"""1.5 · 2^23: (v + ROUND) - ROUND is v rounded to an integer, half to even, for |v| < 2^22."""

SMALLEST = np.float32(1e-15)
"""Groups whose largest magnitude is below are zero."""

# what `fit_offsets` tries: first, step, number of tries after the first, whether errors are magnitudes instead of squares
SEARCH_WEIGHTED = (np.float32(-0.9), np.float32(0.05), 36, False)


@kernel
def nearest(value: Any) -> Any:
    """The nearest integer as ggml computes it, also where it goes wrong: for |value| ≥ 2^22, infinity and NaN."""
    return np.int32(np.float32(value + ROUND).view(np.int32) & np.int32(0x7FFFFF)) - np.int32(0x400000)


@kernel
def between(value: Any, low: Any, high: Any) -> Any:
    """`value`, at least `low` and at most `high`; NaN is `low`."""
    value = value if value > low else low
    return value if value < high else high


# ---- lanes


@kernel
def load(numbers: np.ndarray, first: int, size: int, x: np.ndarray) -> int:
    """x[i, v] = element i of block first + v, of `size` numbers; 0 after the last block. Returns how many blocks there are."""
    count = min(LANES, numbers.size // size - first)
    for v in range(LANES):
        if v < count:
            block = numbers[(first + v) * size : (first + v + 1) * size]
            for i in range(size):
                x[i, v] = block[i]
        else:
            for i in range(size):
                x[i, v] = ZERO
    return count


@kernel
def load_importances(importances: np.ndarray, first: int, size: int, w: np.ndarray) -> None:
    """w[i, v] = the importance of element i of block first + v: that of its column."""
    for v in range(LANES):
        start = (first + v) * size % importances.size
        columns = importances[start : start + size]
        for i in range(size):
            w[i, v] = columns[i]


@kernel
def store(bytes_: np.ndarray, count: int, first: int, out: np.ndarray) -> None:
    """Byte i of block first + v of `out` = bytes_[i, v]."""
    size = bytes_.shape[0]
    for v in range(count):
        block = out[(first + v) * size : (first + v + 1) * size]
        for i in range(size):
            block[i] = bytes_[i, v]


@kernel(known={"in": [F16], "out": [F16]})
def store_half(values: np.ndarray, bytes_: np.ndarray) -> None:
    """bytes_ [2, LANES] = values as float16; values = what they became: levels are chosen for the scale that readers have."""
    raw = np.empty(2 * LANES, np.uint8)
    encode(values, LANES, F16, 0, raw)
    decode(raw, F16, 0, LANES, values)
    for v in range(LANES):
        bytes_[0, v] = raw[2 * v]
        bytes_[1, v] = raw[2 * v + 1]


@kernel
def mean_square(x: np.ndarray, factor: np.float32, out: np.ndarray) -> None:
    """out = factor · Σ x² / n, in ggml's order: (factor · Σ) / n."""
    out[:] = ZERO
    for i in range(x.shape[0]):
        for v in range(LANES):
            out[v] += x[i, v] * x[i, v]
    for v in range(LANES):
        out[v] = factor * out[v] / np.float32(x.shape[0])


@kernel
def weigh(x: np.ndarray, variance: np.ndarray, w: np.ndarray) -> None:
    """w = importance · √(variance + x²), in place."""
    for i in range(x.shape[0]):
        for v in range(LANES):
            w[i, v] = w[i, v] * np.sqrt(variance[v] + x[i, v] * x[i, v])


@kernel
def total(w: np.ndarray, out: np.ndarray) -> None:
    """out = Σ w of each lane."""
    out[:] = ZERO
    for i in range(w.shape[0]):
        for v in range(LANES):
            out[v] += w[i, v]


# ---- fits


@kernel
def _sum_levels(x: np.ndarray, w: np.ndarray, top: np.float32, slopes: np.ndarray, low: np.ndarray, sums: np.ndarray) -> None:
    """sums float32 [3, LANES] = Σ w l, Σ w l², Σ w l x of the levels l = nearest(slope · (x - low)), 0 to top."""
    sum_l, sum_ll, sum_lx = sums[0], sums[1], sums[2]
    for v in range(LANES):
        sum_l[v] = sum_ll[v] = sum_lx[v] = ZERO
    for i in range(0, x.shape[0], 8):
        eight, weights = x[i : i + 8], w[i : i + 8]
        for v in range(LANES):
            s1, s2, s3, a, b = sum_l[v], sum_ll[v], sum_lx[v], slopes[v], low[v]
            for j in range(8):
                e = eight[j, v]
                level = between((a * (e - b) + ROUND) - ROUND, ZERO, top)
                weighted = weights[j, v] * level
                s1 += weighted
                s2 += weighted * level
                s3 += weighted * e
            sum_l[v], sum_ll[v], sum_lx[v] = s1, s2, s3


@kernel
def fit_offsets(x: np.ndarray, w: np.ndarray, top: np.float32, search: Any, fit: np.ndarray) -> None:
    """For each lane: scale s and offset m ≥ 0 that make Σ w (s · l - m - x)² small, for integers l from 0 to top.

    x       float32 [n, LANES], n a multiple of 8
    w       float32 [n, LANES]
    search  the first numerator, its step, the tries after the first, and whether errors are magnitudes instead of squares
    fit     float32 [4, LANES]: s, m, and the a, b of l = nearest(a · (x - b))
    """
    scale, low, slope, origin = fit[0], fit[1], fit[2], fit[3]
    first, step, tries, magnitudes = search
    high, slopes = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    sums, best, errors = np.empty((5, LANES), np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    trial, constant = np.empty((2, LANES), np.float32), np.empty(LANES, np.bool_)
    sum_w, sum_x, sum_l, sum_ll, sum_lx = sums[0], sums[1], sums[2], sums[3], sums[4]
    for v in range(LANES):
        low[v] = high[v] = x[0, v]
        sum_w[v] = w[0, v]
        sum_x[v] = w[0, v] * x[0, v]
    for i in range(1, x.shape[0]):
        for v in range(LANES):
            low[v] = x[i, v] if x[i, v] < low[v] else low[v]
            high[v] = x[i, v] if x[i, v] > high[v] else high[v]
            sum_w[v] += w[i, v]
            sum_x[v] += w[i, v] * x[i, v]
    for v in range(LANES):
        low[v] = ZERO if low[v] > ZERO else low[v]
        origin[v] = low[v]
        slope[v] = top / (high[v] - low[v])
        scale[v] = ONE / slope[v]
        slope[v] = _finite(slope[v])
        constant[v] = high[v] == low[v]
        trial[0, v] = scale[v]
        trial[1, v] = low[v]
    _offset_errors(x, w, top, magnitudes, slope, low, trial, best)
    for k in range(tries + 1):
        numerator = first + step * np.float32(k) + top
        for v in range(LANES):
            slopes[v] = _finite(numerator / (high[v] - low[v]))
        _sum_levels(x, w, top, slopes, low, sums[2:])
        for v in range(LANES):
            divisor = sum_w[v] * sum_ll[v] - sum_l[v] * sum_l[v]
            s = (sum_w[v] * sum_lx[v] - sum_x[v] * sum_l[v]) / divisor
            m = (sum_ll[v] * sum_x[v] - sum_l[v] * sum_lx[v]) / divisor
            s = sum_lx[v] / sum_ll[v] if m > ZERO else s
            trial[0, v] = s
            trial[1, v] = ZERO if m > ZERO else m
            sum_l[v] = divisor
        _offset_errors(x, w, top, magnitudes, slopes, low, trial, errors)
        for v in range(LANES):
            better = sum_l[v] > ZERO and errors[v] < best[v]
            best[v] = errors[v] if better else best[v]
            scale[v] = trial[0, v] if better else scale[v]
            slope[v] = slopes[v] if better else slope[v]
            origin[v] = low[v] if better else origin[v]
            low[v] = trial[1, v] if better else low[v]  # the tries that follow start here
    for v in range(LANES):
        low[v] = -low[v]
        if constant[v]:
            scale[v] = slope[v] = ZERO


@kernel
def _finite(slope: Any) -> Any:
    """0 for an infinite slope: ggml's rounding makes 0 of what it gives, which infinity · 0 = NaN would not."""
    return slope if slope < np.float32(np.inf) else ZERO


@kernel
def _offset_errors(
    x: np.ndarray,
    w: np.ndarray,
    top: np.float32,
    magnitudes: bool,
    slope: np.ndarray,
    low: np.ndarray,
    trial: np.ndarray,
    out: np.ndarray,
) -> None:
    """out = Σ w · |error| or Σ w · error² of a trial: float32 [2, LANES], its scale and minimum."""
    out[:] = ZERO
    for i in range(0, x.shape[0], 8):
        eight, weights = x[i : i + 8], w[i : i + 8]
        for v in range(LANES):
            sum_, a, b, s, m = out[v], slope[v], low[v], trial[0, v], trial[1, v]
            for j in range(8):
                e = eight[j, v]
                level = between((a * (e - b) + ROUND) - ROUND, ZERO, top)
                difference = s * level + m - e
                sum_ += weights[j, v] * (abs(difference) if magnitudes else difference * difference)
            out[v] = sum_


@kernel
def fit_scales(x: np.ndarray, w: np.ndarray, top: np.float32, fit: np.ndarray) -> None:
    """For each lane: the scale s that makes Σ w (s · l - x)² small, for integers l from -top to top - 1.

    x, w  float32 [n, LANES], n a multiple of 8
    fit   float32 [3, LANES]: s, the a of l = nearest(a · x), and 1 where the group is not zero
    """
    scale, slope, live = fit[0], fit[1], fit[2]
    largest, slopes, best = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    sum_lx, sum_ll = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    largest_scale(x, largest)
    for v in range(LANES):
        live[v] = ZERO if abs(largest[v]) < SMALLEST else ONE
        slope[v] = -top / largest[v]
    _scale_sums(x, w, top, slope, sum_lx, sum_ll)
    for v in range(LANES):
        scale[v] = sum_lx[v] / sum_ll[v] if sum_ll[v] != ZERO else ZERO
        best[v] = scale[v] * sum_lx[v]
    for k in range(-9, 10):
        if k:
            for v in range(LANES):
                slopes[v] = -(top + TENTH * np.float32(k)) / largest[v]
            _scale_sums(x, w, top, slopes, sum_lx, sum_ll)
            for v in range(LANES):
                better = sum_ll[v] > ZERO and sum_lx[v] * sum_lx[v] > best[v] * sum_ll[v]
                scale[v] = sum_lx[v] / sum_ll[v] if better else scale[v]
                best[v] = scale[v] * sum_lx[v] if better else best[v]
                slope[v] = slopes[v] if better else slope[v]
    for v in range(LANES):
        scale[v] = scale[v] if live[v] else ZERO


@kernel
def _scale_sums(
    x: np.ndarray, w: np.ndarray, top: np.float32, slope: np.ndarray, sum_lx: np.ndarray, sum_ll: np.ndarray
) -> None:
    """Σ w x l and Σ w l², with l = nearest(slope · x)."""
    for v in range(LANES):
        sum_lx[v] = sum_ll[v] = ZERO
    for i in range(0, x.shape[0], 8):
        eight, weights = x[i : i + 8], w[i : i + 8]
        for v in range(LANES):
            s1, s2, a = sum_lx[v], sum_ll[v], slope[v]
            for j in range(8):
                level = between((a * eight[j, v] + ROUND) - ROUND, -top, top - ONE)
                s1 += weights[j, v] * eight[j, v] * level
                s2 += weights[j, v] * level * level
            sum_lx[v], sum_ll[v] = s1, s2


@kernel
def descend_scales(x: np.ndarray, top: np.float32, scale: np.ndarray, levels: np.ndarray) -> None:
    """As `fit_scales` with w = x², by another way: single levels change as long as the error falls, in five rounds at most.

    scale   float32 [LANES]
    levels  float32 [n, LANES]: l + top, or 0 where the group is zero
    """
    largest, sum_lx, sum_ll = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    largest_scale(x, largest)
    sum_lx[:] = ZERO
    sum_ll[:] = ZERO
    for i in range(x.shape[0]):
        for v in range(LANES):
            e = x[i, v]
            level = between((-top / largest[v] * e + ROUND) - ROUND, -top, top - ONE)
            levels[i, v] = level
            sum_lx[v] += e * e * e * level
            sum_ll[v] += e * e * level * level
    for _ in range(5):
        for i in range(x.shape[0]):
            for v in range(LANES):
                e, level = x[i, v], levels[i, v]
                w = e * e
                lx, ll = sum_lx[v] - w * e * level, sum_ll[v] - w * level * level
                new = between(np.float32(nearest(e * ll / lx)), -top, top - ONE)
                lx_new, ll_new = lx + w * e * new, ll + w * new * new
                fewer = lx_new * lx_new * sum_ll[v] > sum_lx[v] * sum_lx[v] * ll_new
                change = lx > ZERO and new != level and ll_new > ZERO and fewer
                levels[i, v] = new if change else level
                sum_lx[v] = lx_new if change else sum_lx[v]
                sum_ll[v] = ll_new if change else sum_ll[v]
    for v in range(LANES):
        live = not abs(largest[v]) < SMALLEST
        scale[v] = sum_lx[v] / sum_ll[v] if live and sum_ll[v] > ZERO else ZERO
        for i in range(x.shape[0]):
            levels[i, v] = levels[i, v] + top if live else ZERO


@kernel
def fit_positive(x: np.ndarray, w: np.ndarray, top: np.float32, scale: np.ndarray, levels: np.ndarray) -> None:
    """For each lane: the scale s that makes Σ w (s · l - x)² small, for integers l from 0 to top; x are scales of groups.

    ggml keeps a level in a byte: a negative one becomes 256 more.

    scale   float32 [LANES]
    levels  int32 [n, LANES]
    """
    n = x.shape[0]
    for v in range(LANES):  # scales of groups are few: what follows is a small part of the time
        largest = ZERO
        for i in range(n):
            largest = largest if largest > x[i, v] else x[i, v]
        if largest < SMALLEST:
            scale[v] = ZERO
            for i in range(n):
                levels[i, v] = 0
            continue
        slope = top / largest
        s, best = ONE / slope, ZERO
        for i in range(n):
            difference = x[i, v] - s * np.float32(nearest(slope * x[i, v]) & 255)
            best += w[i, v] * difference * difference
        for k in range(-4, 5):
            if k:
                tried = (TENTH * np.float32(k) + top) / largest
                s, error = ONE / tried, ZERO
                for i in range(n):
                    difference = x[i, v] - s * min(np.float32(nearest(tried * x[i, v])), top)
                    error += w[i, v] * difference * difference
                if error < best:
                    best, slope = error, tried
        sum_lx, sum_ll = ZERO, ZERO
        for i in range(n):
            level = min(np.float32(nearest(slope * x[i, v])), top)
            levels[i, v] = np.int32(level) & 255
            sum_lx += w[i, v] * x[i, v] * level
            sum_ll += w[i, v] * level * level
        for _ in range(5):
            changed = False
            for i in range(n):
                level = np.float32(levels[i, v])
                lx, ll = sum_lx - w[i, v] * x[i, v] * level, sum_ll - w[i, v] * level * level
                if lx > ZERO and ll > ZERO:
                    new = min(np.float32(nearest(x[i, v] * ll / lx)), top)
                    if new != level:
                        lx += w[i, v] * x[i, v] * new
                        ll += w[i, v] * new * new
                        if lx * lx * sum_ll > sum_lx * sum_lx * ll:
                            levels[i, v] = np.int32(new) & 255
                            sum_lx, sum_ll, changed = lx, ll, True
            if not changed:
                break
        scale[v] = sum_lx / sum_ll if sum_ll > ZERO else ZERO


@kernel
def fitted_levels(x: np.ndarray, top: np.float32, fit: np.ndarray, out: np.ndarray) -> None:
    """out [n, LANES] = the levels of `fit_scales`; 0 in a group that is zero."""
    for i in range(x.shape[0]):
        for v in range(LANES):
            level = between((fit[1, v] * x[i, v] + ROUND) - ROUND, -top, top - ONE) + top
            out[i, v] = np.uint8(level if fit[2, v] else ZERO)


@kernel
def largest_scale(scales: np.ndarray, out: np.ndarray) -> None:
    """out = of the scales of a block [groups, LANES], the one of largest magnitude; the first of equal ones."""
    out[:] = ZERO
    for g in range(scales.shape[0]):
        for v in range(LANES):
            out[v] = scales[g, v] if abs(scales[g, v]) > abs(out[v]) else out[v]
