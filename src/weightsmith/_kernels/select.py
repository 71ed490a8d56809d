"""Exact k-th largest magnitude: the bits of |x| as float32 sort like its value.

One pass counts the elements above a window of bit patterns, and how often each pattern inside it occurs. The window is
guessed from the ranks of the first tile; if the k-th lies elsewhere, two more passes find it for certain: a histogram
of the high 16 bits, then a window that is the bin found. Counts add, so tiles, threads and machines merge without
rounding, and a wrong guess costs time only. bf16 deltas are full of equal magnitudes (7% of elements sit exactly on a
usual threshold), so the tie rule is part of the result: of the elements equal to the threshold those with the lower
flat index are kept, and exactly k in all. Magnitudes are compared as float32; a NaN counts as larger than anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from weightsmith._kernels.codecs import BF16, BF16_IN, BLOCK, OTHER_IN, as_bits, as_float, decode
from weightsmith._kernels.combine import fill, subtract
from weightsmith._kernels.jit import Switch, kernel
from weightsmith._kernels.rows import magnitudes

HIGH_BINS = 1 << 15  # the sign bit of a magnitude is 0
TABLE = 1 << 17
"""Slots of the hash table that counts the patterns of one tile; a bin of the high histogram has at most half as many."""

MAX_PATTERNS = TABLE * 5 // 8

VARIANCE, IMPORTANCE = -1, -2
"""Scores other than the magnitude of one input's delta."""

_BY_DELTA, _BY_VARIANCE = Switch("score", range(1, 1 << 31)), Switch("score", [VARIANCE])
_BY_IMPORTANCE = Switch("score", [IMPORTANCE])


class Scores(NamedTuple):
    """Elements of a tile, and what they are compared by.

    raw, codes  uint8 [inputs, bytes] and int64 [inputs], the base first
    what     i > 0: |raw[i] - raw[0]|; VARIANCE: of the deltas among the models; IMPORTANCE: |raw[1] - raw[0]| · row's factor
    factors  float64 [rows], row r being elements r · cols …; used by IMPORTANCE
    rows, bits  scratch [2, BLOCK], uint32 [BLOCK]
    """

    raw: np.ndarray
    codes: np.ndarray
    what: int
    factors: np.ndarray
    cols: int
    rows: np.ndarray
    bits: np.ndarray


class Patterns(NamedTuple):
    """A hash table of bit patterns, with linear probing.

    patterns, numbers  uint32 [TABLE]; numbers must be all zero before it is used
    slots              uint32 [MAX_PATTERNS]: the slots in use, in the order of first occurrence
    """

    patterns: np.ndarray
    numbers: np.ndarray
    slots: np.ndarray


@kernel
def score_bits(scores: Scores, start: int, n: int) -> None:
    """scores.bits[:n] = the bits, as float32, of the score of elements start … start + n."""
    raw, codes, what, factors, cols, rows, bits = scores
    if _BY_DELTA and what > 0:
        delta_bits(raw, codes, what, start, n, rows, bits)
    elif _BY_VARIANCE and what == VARIANCE:
        variance(raw, codes, start, n, rows)
        magnitudes(rows[1], n, bits)
    elif _BY_IMPORTANCE:
        decode(raw[0], codes[0], start, n, rows[0])
        decode(raw[1], codes[1], start, n, rows[1])
        begin = 0
        while begin < n:  # row by row
            row = (start + begin) // cols
            end = min(n, (row + 1) * cols - start)
            x, y, b = rows[0][begin:end], rows[1][begin:end], bits[begin:end]
            factor = factors[row]
            for j in range(end - begin):
                score = abs(np.float64(y[j]) - np.float64(x[j])) * factor
                b[j] = as_bits(score) & np.uint32(0x7FFFFFFF)
            begin = end


@kernel
def variance(raw: np.ndarray, codes: np.ndarray, start: int, n: int, rows: np.ndarray) -> None:
    """rows[1, :n] = population variance, among the models raw[1:], of elements start … start + n; rows scratch [2, BLOCK].

    The deltas' variance is the models': the base cancels. By updates of mean and sum of squares (Welford 1962), in float64.
    """
    models = raw.shape[0] - 1
    first, x = rows[0][:n], rows[1][:n]
    decode(raw[1], codes[1], start, n, first)
    if models == 1:
        fill(x, n, 0.0)
        return
    decode(raw[2], codes[2], start, n, x)
    if models == 2:
        for j in range(n):
            off = np.float64(x[j]) - np.float64(first[j])
            middle = np.float64(first[j]) + off / 2.0
            x[j] = off * (np.float64(x[j]) - middle) / 2.0
        return
    mean, spread = np.empty(n), np.empty(n)
    for j in range(n):
        off = np.float64(x[j]) - np.float64(first[j])
        mean[j] = np.float64(first[j]) + off / 2.0
        spread[j] = off * (np.float64(x[j]) - mean[j])
    for i in range(3, models + 1):
        decode(raw[i], codes[i], start, n, x)
        for j in range(n):
            off = np.float64(x[j]) - mean[j]
            mean[j] += off / i
            spread[j] += off * (np.float64(x[j]) - mean[j])
    for j in range(n):
        x[j] = spread[j] / models


@kernel
def delta_bits(raw: np.ndarray, codes: np.ndarray, i: int, start: int, n: int, rows: np.ndarray, bits: np.ndarray) -> None:
    """bits[:n] = magnitude bits of raw[i] - raw[0] from element `start`; rows scratch [2, BLOCK]."""
    if (
        BF16_IN and codes[0] == BF16 and codes[i] == BF16
    ):  # what the four steps below come to, in one loop and a third of the time
        b = raw[0].view(np.uint16)[start : start + n]
        x = raw[i].view(np.uint16)[start : start + n]
        out = bits[:n]
        for j in range(n):
            delta = as_float(np.uint32(x[j]) << np.uint32(16)) - as_float(np.uint32(b[j]) << np.uint32(16))
            out[j] = as_bits(delta) & np.uint32(0x7FFFFFFF)
    elif OTHER_IN:
        decode(raw[0], codes[0], start, n, rows[0])
        decode(raw[i], codes[i], start, n, rows[1])
        subtract(rows[1], rows[0], n)
        magnitudes(rows[1], n, bits)


@kernel(scores_codes="in", scores_what="score")
def count_high(
    scores: Scores,
    n: int,
    counts: np.ndarray,
) -> None:
    """counts[b] += elements whose score's bits begin with b; counts uint32 [HIGH_BINS]. See `Scores`."""
    bits = scores.bits
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        score_bits(scores, start, m)
        for j in range(m):
            counts[bits[j] >> np.uint32(16)] += np.uint32(1)


@kernel
def _count_patterns(bits: np.ndarray, table: Patterns, n_patterns: int) -> int:
    """Count each of some patterns; how many there are then, or -1 when there are more than MAX_PATTERNS."""
    patterns, numbers, slots = table
    for j in range(bits.size):
        x = bits[j]
        slot = np.uint32(x * np.uint32(2654435761)) >> np.uint32(15)
        while numbers[slot] != 0 and patterns[slot] != x:
            slot = np.uint32(slot + np.uint32(1)) & np.uint32(TABLE - 1)
        if numbers[slot] == 0:
            if n_patterns == MAX_PATTERNS:
                return -1
            patterns[slot] = x
            slots[n_patterns] = slot
            n_patterns += 1
        numbers[slot] += np.uint32(1)
    return n_patterns


@kernel(scores_codes="in", scores_what="score")
def count_windows(
    scores: Scores,
    n: int,
    firsts: np.ndarray,
    ends: np.ndarray,
    aboves: np.ndarray,
    table: Patterns,
) -> int:
    """Count the scores' bits that lie in any of the windows firsts[w] … ends[w] - 1, by pattern. See `Scores`.

    aboves  int64 [windows]: elements that are ends[w] or more

    Returns the number of patterns found, or -1 when there are more than MAX_PATTERNS.
    """
    bits = scores.bits
    inside_of = np.empty(BLOCK, np.uint32)
    aboves[:] = 0
    n_patterns = 0
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        score_bits(scores, start, m)
        b, marks = bits[:m], inside_of[:m]
        inside = 0
        for w in range(firsts.size):
            end = np.uint32(ends[w])
            higher = np.uint32(0)
            for j in range(m):
                higher = np.uint32(higher + np.uint32(b[j] >= end))
            aboves[w] += higher
        # No branch: a few per cent are inside, too many for the branch predictor.
        if firsts.size == 1:
            low, span = np.uint32(firsts[0]), np.uint32(ends[0] - firsts[0])
            for j in range(m):
                x = b[j]
                b[inside] = x
                inside += int(np.uint32(x - low) < span)  # wraps round below the window, to beyond its end
        else:
            marks[:] = 0
            for w in range(firsts.size):
                low, span = np.uint32(firsts[w]), np.uint32(ends[w] - firsts[w])
                for j in range(m):
                    marks[j] |= np.uint32(np.uint32(b[j] - low) < span)
            for j in range(m):
                x = b[j]
                b[inside] = x
                inside += int(marks[j])
        n_patterns = _count_patterns(b[:inside], table, n_patterns)
        if n_patterns < 0:
            break
    return n_patterns


@kernel
def find_bin(counts: np.ndarray, k: int) -> tuple[Any, Any]:
    """The bin that holds the k-th largest (k >= 1), and how many elements lie in higher bins."""
    above = np.int64(0)
    b = counts.size - 1
    while b > 0 and above + np.int64(counts[b]) < k:
        above += np.int64(counts[b])
        b -= 1
    return b, above


@kernel(scores_codes="in", scores_what="score")
def index_of_tie(
    scores: Scores,
    n: int,
    threshold: int,
    quota: int,
) -> int:
    """Index just past the `quota`-th element whose score's bits equal `threshold`; n if there are fewer. See `Scores`."""
    bits = scores.bits
    remaining = quota
    if remaining == 0:
        return 0
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        score_bits(scores, start, m)
        for j in range(m):
            if bits[j] == np.uint32(threshold):
                remaining -= 1
                if remaining == 0:
                    return start + j + 1
    return n


@kernel(scores_codes="in", scores_what="score")
def select_scores(
    scores: Scores,
    n: int,
    limit: int,
    cut: int,
    selected: np.ndarray,
) -> None:
    """selected[:n] (uint8) = 1 where the score's bits exceed `limit`, or equal it at an index below `cut`. See `Scores`."""
    bits = scores.bits
    bound = np.uint32(limit)
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        score_bits(scores, start, m)
        ties = min(max(cut - start, 0), m)
        b, s = bits[:ties], selected[start : start + ties]
        for j in range(ties):
            s[j] = np.uint8(b[j] >= bound)
        b, s = bits[ties:m], selected[start + ties : start + m]
        for j in range(m - ties):
            s[j] = np.uint8(b[j] > bound)
