"""ggml's blocks of numbers, byte for byte, by the name of their type: Q2_K to Q6_K; Q4_0, Q4_1, Q5_0, Q5_1, Q8_0; IQ4_NL and
IQ4_XS.

A K-quant is a block of 256 numbers in groups with a scale (and an offset) of few bits each, and one float16 scale for these.
A first fit finds the scales of the groups, a second one how they are rounded; then the numbers are rounded again with what
was stored.

Source: `ggml-quants.c` of ggml-org/llama.cpp, the reference for every byte; k-quants, its pull request 1684.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsmith._kernels.ggml_fits import (
    LANES,
    ONE,
    ROUND,
    SEARCH_WEIGHTED,
    SMALLEST,
    TENTH,
    ZERO,
    between,
    descend_scales,
    fit_offsets,
    fit_positive,
    fit_scales,
    fitted_levels,
    largest_scale,
    load,
    load_importances,
    mean_square,
    nearest,
    store,
    store_half,
    total,
    weigh,
)
from weightsmith._kernels.jit import kernel, writable

BLOCK = 256
"""Numbers in a block of a K-quant."""

# what `fit_offsets` tries
_SEARCH_2 = (np.float32(-0.5), TENTH, 15, True)
_SEARCH_4 = (np.float32(-1), TENTH, 20, False)
_SEARCH_5 = (np.float32(-0.5), TENTH, 15, False)


# ---- blocks of 256 with offsets: Q2_K, Q4_K, Q5_K


@kernel
def fit_groups(
    x: np.ndarray, w: np.ndarray, importances: np.ndarray, top: np.float32, search: Any, fits: np.ndarray, weights: np.ndarray
) -> None:
    """`fit_offsets` for each group of a block.

    x        float32 [256, LANES]
    w        float32 [256, LANES]: importances, if there are any; overwritten
    fits     float32 [groups, 4, LANES]
    weights  float32 [groups, LANES]: sums of the weights of a group, where there are importances
    """
    groups = fits.shape[0]
    n = BLOCK // groups
    variance = np.zeros(LANES, np.float32)
    if importances.size:
        mean_square(x, ONE if n == 16 else np.float32(2), variance)
        search = SEARCH_WEIGHTED
    for g in range(groups):
        part, weight = x[g * n : (g + 1) * n], w[g * n : (g + 1) * n]
        if importances.size:
            weigh(part, variance, weight)
            total(weight, weights[g])
        else:
            if n == 32:
                mean_square(part, ONE, variance)
            for i in range(n):
                for v in range(LANES):
                    weight[i, v] = np.sqrt(variance[v]) + abs(part[i, v])
        fit_offsets(part, weight, top, search, fits[g])


@kernel
def round_groups(
    values: np.ndarray, weights: np.ndarray, weighted: bool, top: np.float32, scale: np.ndarray, levels: np.ndarray
) -> None:
    """Scales of groups as integers, and the scale of these.

    values, weights  float32 [groups, LANES]
    scale            float32 [LANES]
    levels           int32 [groups, LANES]: 0 to 255
    """
    if weighted:
        fit_positive(values, weights, top, scale, levels)
        return
    for v in range(LANES):
        largest = ZERO
        for g in range(values.shape[0]):
            largest = values[g, v] if values[g, v] > largest else largest
        slope = top / largest if largest > ZERO else ZERO
        scale[v] = largest / top
        for g in range(values.shape[0]):
            levels[g, v] = nearest(slope * values[g, v]) & 255


@kernel
def round_with_offsets(
    x: np.ndarray, top: int, scale: np.ndarray, offset: np.ndarray, fit: np.ndarray, out: np.ndarray
) -> None:
    """out [n, LANES] = nearest((x + offset) / scale), 0 to top; as the fit has it where the scale is 0."""
    for i in range(x.shape[0]):
        for v in range(LANES):
            fitted = nearest(fit[2, v] * (x[i, v] - fit[3, v]))
            rounded = nearest((x[i, v] + offset[v]) / scale[v])
            out[i, v] = np.uint8(min(max(rounded if scale[v] != ZERO else fitted, 0), top))


@kernel
def encode_with_offsets(numbers: np.ndarray, importances: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Blocks of Q2_K, Q4_K or Q5_K.

    numbers      float32 [blocks · 256], finite
    importances  float32: of the columns of a row, or empty
    out          uint8 [blocks · bytes of a block]
    """
    groups = 16 if bits == 2 else 8
    n = BLOCK // groups
    top, top_scale = np.float32((1 << bits) - 1), np.float32(15 if bits == 2 else 63)
    search = _SEARCH_2 if bits == 2 else (_SEARCH_4 if bits == 4 else _SEARCH_5)
    x, w = np.empty((BLOCK, LANES), np.float32), np.empty((BLOCK, LANES), np.float32)
    fits, weights = np.empty((groups, 4, LANES), np.float32), np.empty((groups, LANES), np.float32)
    scale_levels, offset_levels = np.empty((groups, LANES), np.int32), np.empty((groups, LANES), np.int32)
    scale, offset = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    group_scale, group_offset = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    levels = np.empty((BLOCK, LANES), np.uint8)
    size = 84 if bits == 2 else (144 if bits == 4 else 176)
    packed = np.empty((size, LANES), np.uint8)
    for first in range(0, numbers.size // BLOCK, LANES):
        count = load(numbers, first, BLOCK, x)
        if importances.size:
            load_importances(importances, first, BLOCK, w)
        fit_groups(x, w, importances, top, search, fits, weights)
        round_groups(fits[:, 0], weights, importances.size > 0, top_scale, scale, scale_levels)
        round_groups(fits[:, 1], weights, importances.size > 0, top_scale, offset, offset_levels)
        if bits == 2:
            store_half(scale, packed[80:82])
            store_half(offset, packed[82:84])
            for g in range(16):
                for v in range(LANES):
                    packed[g, v] = np.uint8((scale_levels[g, v] | (offset_levels[g, v] << 4)) & 255)
                    scale_levels[g, v] = packed[g, v] & 15
                    offset_levels[g, v] = packed[g, v] >> 4
        else:
            store_half(scale, packed[0:2])
            store_half(offset, packed[2:4])
            clamp = bits == 5 or not importances.size
            pack_scales(scale_levels, offset_levels, clamp, packed[4:16])
        for g in range(groups):
            for v in range(LANES):
                group_scale[v] = scale[v] * np.float32(scale_levels[g, v])
                group_offset[v] = offset[v] * np.float32(offset_levels[g, v])
            part = slice(g * n, (g + 1) * n)
            round_with_offsets(x[part], (1 << bits) - 1, group_scale, group_offset, fits[g], levels[part])
        if bits == 2:
            pack_twos(levels, packed[16:80])
        elif bits == 4:
            pack_fours(levels, packed[16:144])
        else:
            pack_fours(levels, packed[48:176])
            pack_bits(levels, 4, packed[16:48])
        store(packed, count, first, out)


@kernel
def pack_scales(scales: np.ndarray, offsets: np.ndarray, clamp: bool, out: np.ndarray) -> None:
    """Eight scales and eight offsets of 6 bits in twelve bytes, out [12, LANES]; they become what a reader finds there."""
    for v in range(LANES):
        for g in range(8):
            s, m = scales[g, v], offsets[g, v]
            if clamp:
                s, m = min(s, 63), min(m, 63)
            if g < 4:
                out[g, v] = np.uint8(s)
                out[g + 4, v] = np.uint8(m)
            else:
                out[g + 4, v] = np.uint8((s & 15) | ((m & 15) << 4))
                out[g - 4, v] |= np.uint8((s >> 4 << 6) & 255)
                out[g, v] |= np.uint8((m >> 4 << 6) & 255)
        for g in range(4):
            scales[g, v] = out[g, v] & 63
            offsets[g, v] = out[g + 4, v] & 63
            scales[g + 4, v] = (out[g + 8, v] & 15) | (out[g, v] >> 6 << 4)
            offsets[g + 4, v] = (out[g + 8, v] >> 4) | (out[g + 4, v] >> 6 << 4)


@kernel
def pack_twos(levels: np.ndarray, out: np.ndarray) -> None:
    """out [64, LANES]: four numbers of 2 bits in a byte, 32 apart."""
    for i in range(64):
        j = i // 32 * 128 + i % 32
        for v in range(LANES):
            low = (levels[j, v] & 3) | ((levels[j + 32, v] & 3) << 2)
            out[i, v] = np.uint8(low | ((levels[j + 64, v] & 3) << 4) | ((levels[j + 96, v] & 3) << 6))


@kernel
def pack_fours(levels: np.ndarray, out: np.ndarray) -> None:
    """out [128, LANES]: the low halves of two numbers in a byte, 32 apart."""
    for i in range(128):
        j = i // 32 * 64 + i % 32
        for v in range(LANES):
            out[i, v] = np.uint8((levels[j, v] & 15) | ((levels[j + 32, v] & 15) << 4))


@kernel
def pack_bits(levels: np.ndarray, shift: int, out: np.ndarray) -> None:
    """Shift the levels [256, LANES] right, which leaves one bit of each, and pack these: out [32, LANES]."""
    for i in range(32):
        for v in range(LANES):
            high = 0
            for g in range(8):
                high |= (levels[32 * g + i, v] >> shift) << g
            out[i, v] = np.uint8(high)


# ---- blocks of 256 without offsets: Q3_K, Q6_K


@kernel
def round_around_zero(x: np.ndarray, top: int, scale: np.ndarray, fitted: np.ndarray) -> None:
    """fitted [n, LANES] = nearest(x / scale) + top; left alone where the scale is 0."""
    for i in range(x.shape[0]):
        for v in range(LANES):
            rounded = min(max(nearest(x[i, v] / scale[v]), -top), top - 1) + top
            fitted[i, v] = np.uint8(rounded if scale[v] != ZERO else fitted[i, v])


@kernel
def encode_q6_k(numbers: np.ndarray, importances: np.ndarray, out: np.ndarray) -> None:
    """Blocks of Q6_K: see `encode_with_offsets`."""
    x, w = np.empty((BLOCK, LANES), np.float32), np.empty((BLOCK, LANES), np.float32)
    fit, scales = np.empty((3, LANES), np.float32), np.empty((16, LANES), np.float32)
    largest, scale, group_scale = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    levels, packed = np.empty((BLOCK, LANES), np.uint8), np.empty((210, LANES), np.uint8)
    top = np.float32(32)
    for first in range(0, numbers.size // BLOCK, LANES):
        count = load(numbers, first, BLOCK, x)
        if importances.size:
            load_importances(importances, first, BLOCK, w)
        else:
            for i in range(BLOCK):
                for v in range(LANES):
                    w[i, v] = x[i, v] * x[i, v]
        for g in range(16):
            part = slice(16 * g, 16 * g + 16)
            fit_scales(x[part], w[part], top, fit)
            fitted_levels(x[part], top, fit, levels[part])
            for v in range(LANES):
                scales[g, v] = fit[0, v]
        largest_scale(scales, largest)
        for v in range(LANES):
            scale[v] = ONE / (np.float32(-128) / largest[v]) if not abs(largest[v]) < SMALLEST else ZERO
        store_half(scale, packed[208:210])
        for g in range(16):
            for v in range(LANES):
                rounded = min(nearest(np.float32(-128) / largest[v] * scales[g, v]), 127)
                rounded = np.int32(np.int8(rounded)) if not abs(largest[v]) < SMALLEST else 0
                packed[192 + g, v] = np.uint8(rounded & 255)
                group_scale[v] = scale[v] * np.float32(rounded)
            part = slice(16 * g, 16 * g + 16)
            round_around_zero(x[part], 32, group_scale, levels[part])
        for i in range(BLOCK):
            for v in range(LANES):
                levels[i, v] = levels[i, v] if not abs(largest[v]) < SMALLEST else 0
        for i in range(64):
            j, k = i // 32 * 128 + i % 32, i // 32 * 64 + i % 32
            for v in range(LANES):
                a, b, c, d = levels[j, v], levels[j + 32, v], levels[j + 64, v], levels[j + 96, v]
                packed[k, v] = np.uint8((a & 15) | ((c & 15) << 4))
                packed[k + 32, v] = np.uint8((b & 15) | ((d & 15) << 4))
                packed[128 + i, v] = np.uint8((a >> 4) | (b >> 4 << 2) | (c >> 4 << 4) | (d >> 4 << 6))
        store(packed, count, first, out)


@kernel
def encode_q3_k(numbers: np.ndarray, importances: np.ndarray, out: np.ndarray) -> None:
    """Blocks of Q3_K: see `encode_with_offsets`."""
    x, w = np.empty((BLOCK, LANES), np.float32), np.empty((BLOCK, LANES), np.float32)
    fit, scales, sums = np.empty((3, LANES), np.float32), np.empty((16, LANES), np.float32), np.empty((16, LANES), np.float32)
    fitted, rounded = np.empty((16, LANES), np.float32), np.empty((16, LANES), np.uint8)
    largest, scale, group_scale = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    levels, packed = np.empty((BLOCK, LANES), np.uint8), np.empty((110, LANES), np.uint8)
    top, top_scale = np.float32(4), np.float32(32)
    for first in range(0, numbers.size // BLOCK, LANES):
        count = load(numbers, first, BLOCK, x)
        if importances.size:
            load_importances(importances, first, BLOCK, w)
            mean_square(x, np.float32(2), scale)
            weigh(x, scale, w)
        for g in range(16):
            part = slice(16 * g, 16 * g + 16)
            if importances.size:
                total(w[part], sums[g])
                fit_scales(x[part], w[part], top, fit)
                fitted_levels(x[part], top, fit, levels[part])
                for v in range(LANES):
                    scales[g, v] = fit[0, v]
            else:
                descend_scales(x[part], top, scales[g], fitted)
                for i in range(16):
                    for v in range(LANES):
                        levels[16 * g + i, v] = np.uint8(fitted[i, v])
        if importances.size:
            fit_scales(scales, sums, top_scale, fit)
            fitted_levels(scales, top_scale, fit, rounded)
            for v in range(LANES):
                scale[v] = fit[0, v]
        else:
            largest_scale(scales, largest)
            for v in range(LANES):
                slope = -top_scale / largest[v]
                scale[v] = ONE / slope if largest[v] != ZERO else ZERO
                for g in range(16):
                    level = min(max(nearest(slope * scales[g, v]), -32), 31) + 32
                    rounded[g, v] = np.uint8(level if largest[v] != ZERO else 0)
        store_half(scale, packed[108:110])
        for g in range(8):
            for v in range(LANES):
                packed[96 + g, v] = np.uint8((rounded[g, v] & 15) | ((rounded[g + 8, v] & 15) << 4))
        for g in range(4):
            for v in range(LANES):
                low = (rounded[g, v] >> 4) | (rounded[g + 4, v] >> 4 << 2)
                packed[104 + g, v] = np.uint8(low | (rounded[g + 8, v] >> 4 << 4) | (rounded[g + 12, v] >> 4 << 6))
        for g in range(16):
            for v in range(LANES):
                group_scale[v] = scale[v] * (np.float32(rounded[g, v]) - top_scale)
            part = slice(16 * g, 16 * g + 16)
            round_around_zero(x[part], 4, group_scale, levels[part])
        pack_bits(levels, 2, packed[0:32])
        pack_twos(levels, packed[32:96])
        store(packed, count, first, out)


# ---- blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0


@kernel
def encode_q8_0(numbers: np.ndarray, out: np.ndarray) -> None:
    """Blocks of Q8_0: a float16 scale and 32 signed bytes, rounded half away from zero. Importances change nothing."""
    x, scale = np.empty((32, LANES), np.float32), np.empty(LANES, np.float32)
    slope, packed = np.empty(LANES, np.float32), np.empty((34, LANES), np.uint8)
    for first in range(0, numbers.size // 32, LANES):
        count = load(numbers, first, 32, x)
        scale[:] = ZERO
        for i in range(32):
            for v in range(LANES):
                scale[v] = abs(x[i, v]) if abs(x[i, v]) > scale[v] else scale[v]
        for v in range(LANES):
            scale[v] = scale[v] / np.float32(127)
            slope[v] = ONE / scale[v] if scale[v] != ZERO else ZERO
        store_half(scale, packed[0:2])
        for i in range(32):
            for v in range(LANES):
                value = x[i, v] * slope[v]
                whole = np.trunc(value)
                away = ONE if value > ZERO else -ONE
                whole += away if abs(value - whole) >= np.float32(0.5) else ZERO
                packed[2 + i, v] = np.uint8(np.int32(whole) & 255)
        store(packed, count, first, out)


@kernel
def pack_32(levels: np.ndarray, bits: int, out: np.ndarray) -> None:
    """out [16 or 20, LANES]: of 32 levels of 5 bits the highest, eight in a byte; then the low halves of two, 16 apart."""
    if bits == 5:
        for i in range(4):
            for v in range(LANES):
                high = 0
                for j in range(8):
                    high |= (levels[8 * i + j, v] >> 4) << j
                out[i, v] = np.uint8(high)
    for i in range(16):
        for v in range(LANES):
            out[out.shape[0] - 16 + i, v] = np.uint8((levels[i, v] & 15) | ((levels[i + 16, v] & 15) << 4))


@kernel
def encode_32(numbers: np.ndarray, importances: np.ndarray, bits: int, offsets: bool, out: np.ndarray) -> None:
    """Blocks of Q4_0, Q4_1, Q5_0 or Q5_1: see `encode_with_offsets`. bits: 4 or 5."""
    x, w, levels = np.empty((32, LANES), np.float32), np.empty((32, LANES), np.float32), np.empty((32, LANES), np.uint8)
    scale, low, fit = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty((4, LANES), np.float32)
    variance = np.empty(LANES, np.float32)
    start = 4 if offsets else 2
    packed = np.empty((start + 16 + (4 if bits == 5 else 0), LANES), np.uint8)
    top = np.float32((1 << bits) - 1) if offsets else np.float32(1 << (bits - 1))
    for first in range(0, numbers.size // 32, LANES):
        count = load(numbers, first, 32, x)
        if importances.size:
            load_importances(importances, first, 32, w)
            row_variance(numbers, first, count, importances.size, variance)
            weigh(x, variance, w)
            if offsets:
                fit_offsets(x, w, top, SEARCH_WEIGHTED, fit)
                for v in range(LANES):
                    scale[v], low[v] = fit[0, v], -fit[1, v]
                for i in range(32):
                    for v in range(LANES):
                        level = between((fit[2, v] * (x[i, v] - fit[3, v]) + ROUND) - ROUND, ZERO, top)
                        levels[i, v] = np.uint8(level)
            else:
                fit_scales(x, w, top, fit)
                fitted_levels(x, top, fit, levels)
                for v in range(LANES):
                    scale[v] = fit[0, v]
        elif offsets:
            for v in range(LANES):
                low[v] = scale[v] = x[0, v]
            for i in range(32):
                for v in range(LANES):
                    low[v] = x[i, v] if x[i, v] < low[v] else low[v]
                    scale[v] = x[i, v] if x[i, v] > scale[v] else scale[v]
            for v in range(LANES):
                scale[v] = (scale[v] - low[v]) / top
            for i in range(32):
                for v in range(LANES):
                    slope = ONE / scale[v] if scale[v] != ZERO else ZERO
                    levels[i, v] = np.uint8(min(np.int32((x[i, v] - low[v]) * slope + np.float32(0.5)), np.int32(top)))
        else:
            largest_scale(x, scale)
            for v in range(LANES):
                scale[v] = scale[v] / -top
            for i in range(32):
                for v in range(LANES):
                    slope = ONE / scale[v] if scale[v] != ZERO else ZERO
                    level = np.int32(x[i, v] * slope + (top + np.float32(0.5)))
                    levels[i, v] = np.uint8(min(level, 2 * np.int32(top) - 1))
        store_half(scale, packed[0:2])
        if offsets:
            store_half(low, packed[2:4])
        pack_32(levels, bits, packed[start:])
        store(packed, count, first, out)


@kernel
def row_variance(numbers: np.ndarray, first: int, count: int, cols: int, out: np.ndarray) -> None:
    """out = the mean square of the row that each block of 32 lies in."""
    known = -1
    for v in range(count):
        row = (first + v) * 32 // cols
        if row != known:
            sum_ = ZERO
            for value in numbers[row * cols : (row + 1) * cols]:
                sum_ += value * value
            known, mean = row, sum_ / np.float32(cols)
        out[v] = mean
    out[count:] = ZERO


# ---- blocks of 32 numbers that are one of sixteen values: IQ4_NL, IQ4_XS

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_VALUES = np.array(_IQ4, np.float32)


@kernel
def nearest_values(x: np.ndarray, slope: np.ndarray, out: np.ndarray) -> None:
    """out [n, LANES] = the index of the value nearest to slope · x, the upper one of two that are equally near."""
    for i in range(x.shape[0]):
        for v in range(LANES):
            value = slope[v] * x[i, v]
            index = 0
            for k in range(15):
                index += 0 if value - IQ4_VALUES[k] < IQ4_VALUES[k + 1] - value else 1
            out[i, v] = np.uint8(index)


@kernel
def fit_values(x: np.ndarray, w: np.ndarray, scale: np.ndarray) -> None:
    """For each lane: the scale s that makes Σ w (s · value - x)² small; x, w float32 [32, LANES]."""
    largest, slope, best = np.empty(LANES, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    sum_qx, sum_qq = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    largest_scale(x, largest)
    for k in range(-8, 8):  # first as it is, then around it
        for v in range(LANES):
            sum_qx[v] = sum_qq[v] = ZERO
            first = ONE / (-largest[v] / IQ4_VALUES[0])
            slope[v] = first if k == -8 else (np.float32(k) + IQ4_VALUES[0]) / largest[v]
        for i in range(x.shape[0]):
            for v in range(LANES):
                value, q = slope[v] * x[i, v], IQ4_VALUES[0]
                for j in range(15):
                    lower, upper = IQ4_VALUES[j], IQ4_VALUES[j + 1]
                    q += ZERO if value - lower < upper - value else upper - lower
                sum_qx[v] += w[i, v] * q * x[i, v]
                sum_qq[v] += w[i, v] * q * q
        for v in range(LANES):
            if k == -8:
                scale[v] = sum_qx[v] / sum_qq[v] if sum_qq[v] > ZERO else ZERO
                best[v] = scale[v] * sum_qx[v]
            else:
                better = sum_qq[v] > ZERO and sum_qx[v] * sum_qx[v] > best[v] * sum_qq[v]
                scale[v] = sum_qx[v] / sum_qq[v] if better else scale[v]
                best[v] = scale[v] * sum_qx[v] if better else best[v]
    for v in range(LANES):
        scale[v] = ZERO if abs(largest[v]) < SMALLEST else scale[v]


@kernel
def encode_iq4(numbers: np.ndarray, importances: np.ndarray, block: int, out: np.ndarray) -> None:
    """Blocks of IQ4_NL (of 32 numbers) or IQ4_XS (of 256): see `encode_with_offsets`."""
    groups = block // 32
    x, w, levels = (
        np.empty((block, LANES), np.float32),
        np.empty((block, LANES), np.float32),
        np.empty((block, LANES), np.uint8),
    )
    scales, scale, slope = np.empty((groups, LANES), np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    start = 2 if groups == 1 else 8
    packed = np.empty((start + block // 2, LANES), np.uint8)
    for first in range(0, numbers.size // block, LANES):
        count = load(numbers, first, block, x)
        if importances.size:
            load_importances(importances, first, block, w)
            mean_square(x, np.float32(2), scale)
            weigh(x, scale, w)
        else:
            for i in range(block):
                for v in range(LANES):
                    w[i, v] = x[i, v] * x[i, v]
        for g in range(groups):
            part = slice(32 * g, 32 * g + 32)
            fit_values(x[part], w[part], scales[g])
        if groups == 1:
            for v in range(LANES):
                scale[v] = scales[0, v]
                slope[v] = ONE / scale[v] if scale[v] != ZERO else ZERO
            nearest_values(x, slope, levels)
            store_half(scale, packed[0:2])
        else:
            largest_scale(scales, scale)
            for i in range(2, 8):
                for v in range(LANES):
                    packed[i, v] = 0
            for v in range(LANES):
                scale[v] = -scale[v] / np.float32(32)
            for g in range(groups):
                for v in range(LANES):
                    to_levels = ONE / scale[v] if scale[v] != ZERO else ZERO
                    level = min(max(nearest(to_levels * scales[g, v]), -32), 31)
                    step = scale[v] * np.float32(level)
                    slope[v] = ONE / step if step != ZERO else ZERO
                    packed[4 + g // 2, v] |= np.uint8(((level + 32) & 15) << (4 * (g % 2)))
                    packed[2 + g // 4, v] |= np.uint8((level + 32) >> 4 << (2 * (g % 4)))
                part = slice(32 * g, 32 * g + 32)
                nearest_values(x[part], slope, levels[part])
            store_half(scale, packed[0:2])
        for i in range(block // 2):
            j = i // 16 * 32 + i % 16
            for v in range(LANES):
                packed[start + i, v] = np.uint8(levels[j, v] | (levels[j + 16, v] << 4))
        store(packed, count, first, out)


# ---- by name


def encode_blocks(name: str, numbers: np.ndarray, importances: np.ndarray, out: np.ndarray) -> None:
    """Blocks of the type of this name, one of `ENCODED`.

    numbers      float32 [rows · cols], finite, whole blocks in each row
    importances  float32 [cols], or [0]: all are equal
    out          uint8
    """
    importances = writable(importances)
    if name in ("Q2_K", "Q4_K", "Q5_K"):
        encode_with_offsets(numbers, importances, int(name[1]), out)
    elif name == "Q3_K":
        encode_q3_k(numbers, importances, out)
    elif name == "Q6_K":
        encode_q6_k(numbers, importances, out)
    elif name == "Q8_0":
        encode_q8_0(numbers, out)
    elif name.startswith("IQ4"):
        encode_iq4(numbers, importances, 32 if name == "IQ4_NL" else BLOCK, out)
    else:
        encode_32(numbers, importances, int(name[1]), name[3] == "1", out)


ENCODED = frozenset({"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS"})
"""The types that `encode_blocks` knows."""
