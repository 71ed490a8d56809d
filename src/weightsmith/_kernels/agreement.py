"""Where several deltas of one base agree: signs, largest elements, and what of each is in a merge."""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.codecs import BLOCK, as_bits, decode
from weightsmith._kernels.combine import subtract
from weightsmith._kernels.differences import fold_row
from weightsmith._kernels.jit import kernel

SURVIVAL = 6
"""Columns of `survival`. For the delta d of a model, beside that of the merge, m: Σ d², Σ min(|m|, |d|)² where the signs agree,
elements with d ≠ 0, those of them where m has the other sign, those where m is 0, Σ (m - d)². For the merge: Σ m², Σ base²."""


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
        for j in range(m):
            used[j] = 0
            plus[j] = 0
            minus[j] = 0
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
    """Add the sketch of each row of each delta; see `kernels.differences.fold_row`.

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
                found = out[g, 1 + i]
                found[0] += energy
                found[1] += kept
                found[2] += used
                found[3] += against
                found[4] += dropped
                found[5] += apart
