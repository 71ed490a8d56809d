"""Selections inside a row: the largest of it, a band of ranks, n of every m neighbours, random by rank.

Whole rows, so nothing has to be known beforehand. Order is by the bits of |x| as float32, largest first, equal magnitudes by
their index: it does not depend on how a row is stored or sorted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsmith.kernels.codecs import as_bits
from weightsmith.kernels.jit import kernel

DIGIT = 11  # bits of a radix pass: three of them sort 31-bit magnitudes
BINS = 1 << DIGIT


@kernel
def magnitudes(row: np.ndarray, n: int, bits: np.ndarray) -> None:
    """bits[:n] (uint32) = bits of float32(|row[:n]|)."""
    x, b = row[:n], bits[:n]
    for j in range(n):
        b[j] = as_bits(x[j]) & np.uint32(0x7FFFFFFF)


@kernel
def threshold(bits: np.ndarray, n: int, k: int) -> tuple[Any, Any]:
    """The k-th largest of bits[:n] (1 <= k <= n), and the index below which elements equal to it are among the k.

    Bit by bit from the highest: 31 counts over a row in the cache take a third of the time of sorting it.
    """
    b = bits[:n]
    found = np.uint32(0)
    for shift in range(30, -1, -1):
        candidate = np.uint32(found | (np.uint32(1) << np.uint32(shift)))
        count = np.uint32(0)
        for j in range(n):
            count = np.uint32(count + np.uint32(b[j] >= candidate))
        if count >= k:
            found = candidate
    above = np.uint32(0)
    for j in range(n):
        above = np.uint32(above + np.uint32(b[j] > found))
    left = k - np.int64(above)
    cut = n
    for j in range(n):
        if b[j] == found:
            left -= 1
            if left == 0:
                cut = j + 1
                break
    return np.int64(found), cut


@kernel
def keep_band(row: np.ndarray, n: int, low: int, low_cut: int, high: int, high_cut: int) -> None:
    """Zero what is not among the largest down to `low`, and what is among the largest down to `high`.

    low, high   bits of magnitudes; of elements equal to one those at an index below its cut are among the largest.
                high = 2^31 - 1 with high_cut 0: nothing is too large
    """
    x = row[:n]
    small, large = np.uint32(low), np.uint32(high)
    for j in range(n):
        b = np.uint32(as_bits(x[j]) & np.uint32(0x7FFFFFFF))
        kept = (b > small) | ((b == small) & (j < low_cut))
        cut_off = (b > large) | ((b == large) & (j < high_cut))
        x[j] = x[j] if kept & (not cut_off) else 0.0


@kernel
def keep_ranks(row: np.ndarray, n: int, first: int, end: int, bits: np.ndarray) -> None:
    """Zero row[:n] but for the elements of rank first … end - 1, the largest magnitude having rank 0; bits is scratch."""
    end, first = min(end, n), max(first, 0)
    if end <= first:
        for j in range(n):
            row[j] = 0
        return
    magnitudes(row, n, bits)
    low, low_cut = threshold(bits, n, end)
    high, high_cut = 0x7FFFFFFF, 0
    if first > 0:
        high, high_cut = threshold(bits, n, first)
    keep_band(row, n, low, low_cut, high, high_cut)


@kernel
def keep_in_groups(row: np.ndarray, n: int, keep: int, group: int, taken: np.ndarray, bits: np.ndarray) -> None:
    """Of every `group` neighbours keep the `keep` largest that are not taken; what is kept is then taken.

    taken  uint8 [>= n], 1 where an earlier model has kept an element. A short last group keeps its share, rounded up.
    """
    for start in range(0, n, group):
        m = min(group, n - start)
        x, t = row[start : start + m], taken[start : start + m]
        for j in range(m):
            x[j] = x[j] if t[j] == 0 else 0.0
        keep_ranks(x, m, 0, (keep * m + group - 1) // group, bits)
        for j in range(m):
            t[j] = np.uint8(1) if x[j] != 0 else t[j]


@kernel
def descending(row: np.ndarray, n: int, order: np.ndarray) -> None:
    """order[0, :n] = indices of row[:n], largest magnitude first; order uint32 [4, >= n], rows 1 to 3 are scratch.

    A radix sort, stable, so equal magnitudes stay in their order. Unsigned indices throughout: signed ones may be negative, and
    numba then tests each. A digit that all keys share is skipped.
    """
    keys, spare, place = order[1], order[2], order[3]
    differ = np.uint32(0)
    first = np.uint32(np.uint32(0x7FFFFFFF) - np.uint32(as_bits(row[0]) & np.uint32(0x7FFFFFFF)))
    for j in range(n):
        key = np.uint32(np.uint32(0x7FFFFFFF) - np.uint32(as_bits(row[j]) & np.uint32(0x7FFFFFFF)))
        keys[j] = key
        spare[j] = np.uint32(j)
        differ = np.uint32(differ | np.uint32(key ^ first))
    source, target = spare, place
    counts = np.empty(BINS, np.uint32)
    mask = np.uint32(BINS - 1)
    for d in range(3):
        shift = np.uint32(d * DIGIT)
        if (differ >> shift) & mask == np.uint32(0):
            continue
        counts[:] = 0
        for j in range(n):
            counts[(keys[j] >> shift) & mask] += np.uint32(1)
        at = np.uint32(0)
        for b in range(BINS):
            held = counts[b]
            counts[b] = at
            at = np.uint32(at + held)
        for j in range(n):
            i = source[j]
            b = (keys[i] >> shift) & mask
            target[counts[b]] = i
            counts[b] += np.uint32(1)
        source, target = target, source
    order[0, :n] = source[:n]


@kernel
def keep_by_rank(
    row: np.ndarray, n: int, density: float, epsilon: float, unbiased: bool, words: np.ndarray, order: np.ndarray
) -> None:
    """Keep each element with a probability that grows with its rank, from density - epsilon to density + epsilon.

    unbiased  divide what is kept by its probability
    words     uint32 [>= n], the elements' random words

    The only element of a row is kept with probability `density`.
    """
    descending(row, n, order)
    by_rank, rank = order[0], order[1]
    for j in range(n):
        rank[by_rank[j]] = np.uint32(j)
    highest, step = (density + epsilon, 2.0 * epsilon / (n - 1)) if n > 1 else (density, 0.0)
    x, w, r = row[:n], words[:n], rank[:n]
    for j in range(n):  # in the row's order and without a branch: half of them would be mispredicted
        p = highest - np.float64(r[j]) * step
        value = x[j] / p if unbiased else x[j]
        x[j] = value if np.float64(w[j]) < p * 4294967296.0 else 0.0
