"""ggml's blocks of numbers, byte for byte, by the name of their type: Q2_K to Q6_K (`ggml_k.py`); and Q4_0, Q4_1, Q5_0, Q5_1,
Q8_0, IQ4_NL and IQ4_XS.

Source: `ggml-quants.c` of ggml-org/llama.cpp, the reference for every byte.
"""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.ggml_fits import (
    LANES,
    ONE,
    ROUND,
    SEARCH_WEIGHTED,
    SMALLEST,
    ZERO,
    between,
    fit_offsets,
    fit_scales,
    fitted_levels,
    largest_scale,
    load,
    load_importances,
    mean_square,
    nearest,
    store,
    store_half,
    weigh,
)
from weightsmith._kernels.ggml_k import BLOCK, encode_q3_k, encode_q6_k, encode_with_offsets
from weightsmith._kernels.jit import kernel

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
        if bits == 5:
            for i in range(4):
                for v in range(LANES):
                    high = 0
                    for j in range(8):
                        high |= (levels[8 * i + j, v] >> 4) << j
                    packed[start + i, v] = np.uint8(high)
        for i in range(16):
            for v in range(LANES):
                packed[packed.shape[0] - 16 + i, v] = np.uint8((levels[i, v] & 15) | ((levels[i + 16, v] & 15) << 4))
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
