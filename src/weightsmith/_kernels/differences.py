"""Differences of tensors, statistics of one, and where several deltas of one base agree: sums, counts and sketches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weightsmith._kernels.codecs import BLOCK, Encoded, EncodedInputs, as_bits, as_float, decode
from weightsmith._kernels.combine import LANES, fill, subtract, sum_lanes
from weightsmith._kernels.jit import kernel
from weightsmith._kernels.task_vector import decode_delta

DIFFERENCE_SUMS = 5
"""Columns of `difference`: Σ a², Σ a·d, Σ d², elements with d ≠ 0, the largest |d|; d = b - a."""

STATISTICS = 7
"""Columns of `statistics`: Σ x, Σ x², smallest, largest, zeros, NaN, infinities. Sums and extremes are of finite elements."""

SURVIVAL = 6
"""Columns of `survival`. For the delta d of a model, beside that of the merge, m: Σ d², Σ min(|m|, |d|)² where the signs agree,
elements with d ≠ 0, those of them where m has the other sign, those where m is 0, Σ (m - d)². For the merge: Σ m², Σ base²."""

CHUNK = 1024
"""Columns of a sum that stay in L1 while rows are added to it."""


@kernel
def add_moments(a: np.ndarray, d: np.ndarray, n: int, lanes: np.ndarray) -> None:
    """lanes[0], [1], [2] += a², a·d, d² in float64, element j to lane j % LANES. One loop: each number is widened once."""
    aa, ad, dd = lanes[0, :LANES], lanes[1, :LANES], lanes[2, :LANES]
    whole = n - n % LANES
    for start in range(0, whole, LANES):
        x, y = a[start : start + LANES], d[start : start + LANES]
        for j in range(LANES):
            u, v = np.float64(x[j]), np.float64(y[j])
            aa[j] += u * u
            ad[j] += u * v
            dd[j] += v * v
    for j in range(n - whole):
        u, v = np.float64(a[whole + j]), np.float64(d[whole + j])
        aa[j] += u * u
        ad[j] += u * v
        dd[j] += v * v


@kernel
def count_changes(d: np.ndarray, n: int) -> int:
    """How many of d[:n] are not zero."""
    x = d[:n]
    count = np.uint32(0)
    for j in range(n):
        count = np.uint32(count + np.uint32(x[j] != 0))
    return int(count)


@kernel
def largest_of(d: np.ndarray, n: int) -> float:
    """The largest magnitude of d[:n], as float32. As integers, so that it vectorises; a NaN is the largest."""
    x = d[:n]
    top = np.uint32(0)
    for j in range(n):
        bits = np.uint32(as_bits(x[j]) & np.uint32(0x7FFFFFFF))
        top = bits if bits > top else top
    return np.float64(as_float(top))


@kernel
def fold_row(d: np.ndarray, n: int, signs: np.ndarray, shifts: np.ndarray, folded: np.ndarray) -> None:
    """folded[:] += the row d[:n] times a sparse matrix of signs: a sketch of the row.

    signs   float32 [folds, >= n]; shifts int64 [folds, chunks]: chunk c, as long as `folded`, is added rotated by shifts[·, c]
    """
    width = folded.size
    for f in range(shifts.shape[0]):
        for c in range(-(-n // width)):
            begin = c * width
            m, shift = min(width, n - begin), shifts[f, c]
            head = min(m, width - shift)
            x, s, y = d[begin : begin + head], signs[f, begin : begin + head], folded[shift : shift + head]
            for j in range(head):
                y[j] += s[j] * np.float32(x[j])
            x, s = d[begin + head : begin + m], signs[f, begin + head : begin + m]
            for j in range(m - head):
                folded[j] += s[j] * np.float32(x[j])


class Sketch(NamedTuple):
    """signs, shifts: see `fold_row`; folded float32 [rows, width]: `fold_row` of each row is added, [0, 0]: of none."""

    signs: np.ndarray
    shifts: np.ndarray
    folded: np.ndarray


@kernel(inputs_codes="in")
def difference(
    inputs: EncodedInputs,
    n: int,
    row: int,
    grain: int,
    out: np.ndarray,
    sketch: Sketch,
    rows: np.ndarray,
    lanes: np.ndarray,
) -> None:
    """Differences between two inputs, by grain; see `DIFFERENCE_SUMS`.

    inputs  n elements of each: rows of `row` elements, of which a grain has a whole number
    out     float64 [grains, DIFFERENCE_SUMS]
    rows    scratch [2, >= row]; lanes float64 [3, LANES] scratch
    """
    raw, codes = inputs
    a, d = rows[0], rows[1]
    for g in range(out.shape[0]):
        for k in range(3):
            fill(lanes[k], LANES, 0.0)
        changed, top = 0, 0.0
        end = min(n, (g + 1) * grain)
        for start in range(g * grain, end, row):
            m = min(row, end - start)
            decode(raw[0], codes[0], start, m, a)
            decode_delta(raw[1], codes[1], start, m, a, d)
            add_moments(a, d, m, lanes)
            count = count_changes(d, m)
            if count > 0:
                changed += count
                top = max(top, largest_of(d, m))
                if sketch.folded.shape[0] > 0:
                    fold_row(d, m, sketch.signs, sketch.shifts, sketch.folded[start // row])
        for k in range(3):
            out[g, k] = sum_lanes(lanes[k])
        out[g, 3], out[g, 4] = changed, top


@kernel(codes="in")
def project(
    raw: np.ndarray, codes: np.ndarray, count: int, cols: int, basis: np.ndarray, out: np.ndarray, rows: np.ndarray
) -> None:
    """out += basisᵀ · (raw[1] - raw[0]), row after row, in float32.

    raw    uint8 [2, bytes]: `count` rows of `cols` elements of each
    basis  float32 [>= count, k]; out float32 [k, cols]
    rows   scratch [5, >= cols]
    """
    a = rows[0]
    for first in range(0, count, 4):  # four rows at a time: a sum is loaded and stored once for four products
        for i in range(4):
            if first + i < count:
                decode(raw[0], codes[0], (first + i) * cols, cols, a)
                decode_delta(raw[1], codes[1], (first + i) * cols, cols, a, rows[1 + i])
            else:
                fill(rows[1 + i], cols, 0.0)
        last = min(first + 3, count - 1)
        second, third = min(first + 1, last), min(first + 2, last)
        for begin in range(0, cols, CHUNK):
            m = min(CHUNK, cols - begin)
            w, x = rows[1, begin : begin + m], rows[2, begin : begin + m]
            y, z = rows[3, begin : begin + m], rows[4, begin : begin + m]
            for k in range(out.shape[0]):
                p, q, r, s = basis[first, k], basis[second, k], basis[third, k], basis[last, k]
                total = out[k, begin : begin + m]
                for j in range(m):
                    total[j] += p * w[j] + q * x[j] + r * y[j] + s * z[j]


@kernel
def add_finite(x: np.ndarray, n: int, lanes: np.ndarray, out: np.ndarray) -> None:
    """Enter x[:n] into lanes[0], [1] (Σ x, Σ x²) and into out[2:], as in `STATISTICS`."""
    low, high, zeros, nans, infinities = out[2], out[3], 0, 0, 0
    for j in range(n):
        u = np.float64(x[j])
        if u - u == 0:
            low, high = min(low, u), max(high, u)
            zeros += u == 0
            lanes[0, j % LANES] += u
            lanes[1, j % LANES] += u * u
        elif u != u:
            nans += 1
        else:
            infinities += 1
    out[2], out[3] = low, high
    out[4] += zeros
    out[5] += nans
    out[6] += infinities


@kernel(data_code="in")
def statistics(
    data: Encoded,
    n: int,
    row: int,
    grain: int,
    out: np.ndarray,
    squares: np.ndarray,
    rows: np.ndarray,
    lanes: np.ndarray,
) -> None:
    """What n elements hold, by grain; see `STATISTICS`.

    out      float64 [grains, STATISTICS]
    squares  float64 [rows]: Σ x² of each row of `row` elements
    rows     scratch [1, >= row]; lanes float64 [2, LANES] scratch
    """
    x = rows[0]
    for g in range(out.shape[0]):
        out[g, :] = 0
        out[g, 2], out[g, 3] = np.inf, -np.inf
        end = min(n, (g + 1) * grain)
        for start in range(g * grain, end, row):
            m = min(row, end - start)
            decode(data.data, data.code, start, m, x)
            fill(lanes[0], LANES, 0.0)
            fill(lanes[1], LANES, 0.0)
            add_finite(x, m, lanes, out[g])
            squares[start // row] = sum_lanes(lanes[1])
            out[g, 0] += sum_lanes(lanes[0])
            out[g, 1] += squares[start // row]


@kernel(codes="in")
def agreement(
    raw: np.ndarray,
    codes: np.ndarray,
    n: int,
    limits: np.ndarray,
    counts: np.ndarray,
    rows: np.ndarray,
    marks: np.ndarray,
) -> None:
    """Count where deltas are not zero, where their signs differ, and where they are large.

    raw     uint8 [1 + k, bytes], n elements of each; raw[0] is the base, and the deltas are raw[1:] - raw[0]
    limits  uint32 [k]: a delta is large where the bits of its magnitude are at least so much, and it is not zero
    counts  int64 [2 + pairs], added to: elements where two or more deltas are not zero; those of them where two signs differ;
            elements where both of a pair are large, pairs (i, j) with i <= j in row order
    rows    scratch [2, BLOCK]; marks uint8 [3 + k, BLOCK] scratch
    """
    k = raw.shape[0] - 1
    base, x = rows[0], rows[1]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[0], codes[0], start, m, base)
        used, plus, minus = marks[0, :m], marks[1, :m], marks[2, :m]
        marks[:3, :m] = 0
        for i in range(k):
            decode(raw[1 + i], codes[1 + i], start, m, x)
            subtract(x, base, m)
            d, large, limit = x[:m], marks[3 + i, :m], max(np.uint32(1), limits[i])
            for j in range(m):
                positive, negative = np.uint8(d[j] > 0), np.uint8(d[j] < 0)
                used[j] += positive + negative
                plus[j] |= positive
                minus[j] |= negative
            for j in range(m):
                large[j] = np.uint8(np.uint32(as_bits(d[j]) & np.uint32(0x7FFFFFFF)) >= limit)
        several, differ = np.uint32(0), np.uint32(0)
        for j in range(m):
            several += np.uint32(used[j] > 1)
            differ += np.uint32(plus[j] & minus[j])
        counts[0] += several
        counts[1] += differ
        at = 2
        for i in range(k):
            for o in range(i, k):
                a, b, both = marks[3 + i, :m], marks[3 + o, :m], np.uint32(0)
                for j in range(m):
                    both += np.uint32(a[j] & b[j])
                counts[at] += both
                at += 1


@kernel(codes="in")
def sketch_deltas(
    raw: np.ndarray,
    codes: np.ndarray,
    count: int,
    cols: int,
    signs: np.ndarray,
    shifts: np.ndarray,
    out: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Add the sketch of each row of each delta; see `fold_row`.

    raw   uint8 [1 + k, bytes]: `count` rows of `cols` elements of each
    out   float32 [k, count, width]
    rows  scratch [2, >= cols]
    """
    base, d = rows[0], rows[1]
    for r in range(count):
        decode(raw[0], codes[0], r * cols, cols, base)
        for i in range(out.shape[0]):
            decode(raw[1 + i], codes[1 + i], r * cols, cols, d)
            subtract(d, base, cols)
            fold_row(d, cols, signs, shifts, out[i, r])


@kernel(codes="in")
def survival(raw: np.ndarray, codes: np.ndarray, n: int, group: int, out: np.ndarray, rows: np.ndarray) -> None:
    """What of each delta is in a merge, by groups of `group` elements; see `SURVIVAL`.

    raw   uint8 [2 + k, bytes], n elements of each: the base, the merge, and k models
    out   float64 [groups, 1 + k, SURVIVAL]: of the merge, then of the models
    rows  scratch [3, BLOCK]
    """
    base, merged, x = rows[0], rows[1], rows[2]
    for g in range(out.shape[0]):
        out[g, :, :] = 0
        end = min(n, (g + 1) * group)
        for start in range(g * group, end, BLOCK):
            m = min(BLOCK, end - start)
            decode(raw[0], codes[0], start, m, base)
            decode(raw[1], codes[1], start, m, merged)
            subtract(merged, base, m)
            for j in range(m):
                out[g, 0, 0] += np.float64(merged[j]) * np.float64(merged[j])
                out[g, 0, 1] += np.float64(base[j]) * np.float64(base[j])
            for i in range(out.shape[1] - 1):
                decode(raw[2 + i], codes[2 + i], start, m, x)
                subtract(x, base, m)
                # Sums of a block first, in float64: a long group loses no digits of its small terms.
                energy, kept, used, against, dropped, apart = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                for j in range(m):
                    d, y = np.float64(x[j]), np.float64(merged[j])
                    less = min(abs(d), abs(y))
                    energy += d * d
                    kept += less * less if d * y > 0 else 0.0
                    used += 1.0 if d != 0 else 0.0
                    against += 1.0 if d * y < 0 else 0.0
                    dropped += 1.0 if d != 0 and y == 0 else 0.0
                    apart += (y - d) * (y - d)
                sums = out[g, 1 + i]
                sums[0] += energy
                sums[1] += kept
                sums[2] += used
                sums[3] += against
                sums[4] += dropped
                sums[5] += apart
