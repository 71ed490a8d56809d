"""Selections inside a row: the largest of it, a band of ranks, n of every m neighbours, random by rank.

Whole rows, so nothing has to be known beforehand. Order is by the bits of |x| as float32, largest first, equal magnitudes by
their index: it does not depend on how a row is stored or sorted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsmith._kernels.codecs import as_bits, or_zero
from weightsmith._kernels.jit import Switch, kernel

DIGIT = 11  # bits of a radix pass: three of them sort 31-bit magnitudes
BINS = 1 << DIGIT

FINE_BINS = 4096  # of the first 16 bits of a magnitude, from a row's largest down: 128 to a power of two
SHORT = 32  # rows up to this length are sorted by insertion
CHUNK = 64  # elements that are looked at together
MOST_COUNTED = 64  # elements of a row whose rank is found by counting in the whole row
PATIENCE = 8  # moves an element that insertion may cost before a row is given to the radix sort

_UNBIASED, _BIASED = Switch("unbiased", [True]), Switch("unbiased", [False])


@kernel
def magnitudes(row: np.ndarray, n: int, bits: np.ndarray) -> None:
    """bits[:n] (uint32) = bits of float32(|row[:n]|)."""
    x, b = row[:n], bits[:n]
    for j in range(n):
        b[j] = as_bits(x[j]) & np.uint32(0x7FFFFFFF)


@kernel
def threshold(bits: np.ndarray, n: int, k: int) -> tuple[Any, Any]:
    """The k-th largest of bits[:n] (1 <= k <= n), and the index below which elements equal to it are among the k.

    Bit by bit from the highest, leaving out those that no element has: at most 31 counts over a row in the cache, half as many
    for 16-bit deltas, which take a tenth of the time of sorting it.
    """
    b = bits[:n]
    held = np.uint32(0)
    for j in range(n):
        held = np.uint32(held | b[j])
    kth = np.uint32(0)
    for shift in range(30, -1, -1):
        bit = np.uint32(np.uint32(1) << np.uint32(shift))
        if held & bit == np.uint32(0):
            continue
        candidate = np.uint32(kth | bit)
        count = np.uint32(0)
        for j in range(n):
            count = np.uint32(count + np.uint32(b[j] >= candidate))
        if count >= k:
            kth = candidate
    above, equal = np.uint32(0), np.uint32(0)
    for j in range(n):
        above = np.uint32(above + np.uint32(b[j] > kth))
        equal = np.uint32(equal + np.uint32(b[j] == kth))
    quota = np.uint32(k - np.int64(above))
    if equal <= quota:
        return np.int64(kth), n
    seen, cut = np.uint32(0), np.uint32(1)
    for j in range(n):  # no branch: equal ones are many and anywhere
        seen = np.uint32(seen + np.uint32(b[j] == kth))
        cut = np.uint32(cut + np.uint32(seen < quota))
    return np.int64(kth), np.int64(cut)


@kernel
def keep_between(row: np.ndarray, begin: int, end: int, low: int, high: int) -> None:
    """Zero row[begin:end] but where the bits of its magnitudes are low … high - 1."""
    x = row[begin:end]
    least, span = np.uint32(low), np.uint32(max(high - low, 0))
    for j in range(x.size):
        b = np.uint32(np.uint32(as_bits(x[j]) & np.uint32(0x7FFFFFFF)) - least)  # below `low` it wraps round
        x[j] = or_zero(x[j], b < span)


@kernel
def keep_band(row: np.ndarray, n: int, low: int, low_cut: int, high: int, high_cut: int) -> None:
    """Zero what is not among the largest down to `low`, and what is among the largest down to `high`.

    low, high   bits of magnitudes; of elements equal to one those at an index below its cut are among the largest.
                high = 2^31 - 1 with high_cut 0: nothing is too large
    """
    low_cut, high_cut = min(max(low_cut, 0), n), min(max(high_cut, 0), n)
    first, second = min(low_cut, high_cut), max(low_cut, high_cut)
    keep_between(row, 0, first, low, high)
    if low_cut < high_cut:
        keep_between(row, first, second, low + 1, high)
    else:
        keep_between(row, first, second, low, high + 1)
    keep_between(row, second, n, low + 1, high + 1)


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
    """Keep the `keep` largest of every `group` neighbours that are not taken; what is kept is then taken.

    taken  uint8 [>= n], 1 where an earlier model has kept an element. A short last group keeps its share, rounded up.
    """
    for start in range(0, n, group):
        m = min(group, n - start)
        x, t = row[start : start + m], taken[start : start + m]
        for j in range(m):
            x[j] = or_zero(x[j], t[j] == np.uint8(0))
        keep_ranks(x, m, 0, (keep * m + group - 1) // group, bits)
        for j in range(m):
            t[j] = np.uint8(t[j] | np.uint8(x[j] != 0))


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
    result = order[0]
    for j in range(n):
        result[j] = source[j]


@kernel
def rank_by_sorting(row: np.ndarray, n: int, order: np.ndarray) -> None:
    """order[0, :n] = the rank of each element of row[:n]; see `descending`."""
    descending(row, n, order)
    by_rank, rank = order[0], order[1]
    for j in range(n):
        rank[by_rank[j]] = np.uint32(j)
    for j in range(n):
        by_rank[j] = rank[j]


@kernel
def sort_run(bits: np.ndarray, order: np.ndarray, begin: int, end: int) -> None:
    """Sort the indices order[begin:end] by bits, largest first, by insertion; equal ones stay in their order."""
    for i in range(begin + 1, end):
        index = order[i]
        at = i
        while at > begin and bits[order[at - 1]] < bits[index]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = index


@kernel
def fine_bins(row: np.ndarray, n: int, bits: np.ndarray, bins: np.ndarray) -> tuple[Any, Any]:
    """bits[:n] = magnitude bits of row[:n], bins[:n] (uint16 or uint32) = their bins, the largest in bin 0.

    The last is zero's alone. The one before it also takes what would lie beyond. Returns the last bin, and how many
    elements have other than zeros in the lower 16 bits.
    """
    x, b, c = row[:n], bits[:n], bins[:n]
    top, low, long = np.uint32(0), np.uint32(0xFFFFFFFF), np.uint32(0)
    for j in range(n):
        v = np.uint32(as_bits(x[j]) & np.uint32(0x7FFFFFFF))
        b[j] = v
        long = np.uint32(long + np.uint32((v & np.uint32(0xFFFF)) != np.uint32(0)))
        top = v if v > top else top
        nonzero = np.uint32(v - np.uint32(1))  # zero wraps round to the largest
        low = nonzero if nonzero < low else low
    high = np.uint32(top >> np.uint32(16))
    least = np.uint32(min(np.uint32(low + np.uint32(1)), top) >> np.uint32(16))
    edge = np.uint32(min(np.uint32(high - least), np.uint32(FINE_BINS - 2)))
    last = np.uint32(edge + np.uint32(1))
    for j in range(n):
        v = b[j]
        bin_ = np.uint32(high - (v >> np.uint32(16)))
        bin_ = edge if bin_ > edge else bin_
        c[j] = last if v == np.uint32(0) else bin_
    return np.int64(last), np.int64(long)


@kernel
def ranks(row: np.ndarray, n: int, bits: np.ndarray, order: np.ndarray) -> None:
    """order[0, :n] (uint32) = the rank of each element of row[:n], 0 for the largest magnitude.

    bits uint32 [>= n] and order[1:4] are scratch. By counting: elements of a bin that are all equal, as those of 16-bit deltas
    mostly are, are ranked by the number of larger ones and by how many of their bin came before. A bin's counter also gathers
    which of the lower 16 bits have been 1 in it and which 0, and so tells whether they were all equal. Where not, the bin
    is sorted by insertion; where that would take long, the row is sorted by `descending`.
    """
    rank, bins, place, mixed = order[0][:n], order[1][:n], order[2][:n], order[3][:n]
    if n <= SHORT:
        magnitudes(row, n, bits)
        for j in range(n):
            place[j] = np.uint32(j)
        sort_run(bits, place, 0, n)
        for j in range(n):
            rank[place[j]] = np.uint32(j)
        return
    last, long = fine_bins(row, n, bits, bins)
    if long > n // 4:  # such a row is not worth counting
        rank_by_sorting(row, n, order)
        return
    counts, runs = np.empty(FINE_BINS, np.uint64), np.empty((2, FINE_BINS), np.int64)
    for i in range(last + 1):
        counts[i] = np.uint64(0)
    if last == FINE_BINS - 1:
        counts[last - 1] = np.uint64(0xFFFFFFFF00000000)  # takes several: never all equal
    for j in range(n):
        seen = counts[bins[j]]
        rank[j] = np.uint32(seen)
        ones = np.uint64(bits[j] & np.uint32(0xFFFF))
        zeros = ones ^ np.uint64(0xFFFF)
        counts[bins[j]] = (seen | (ones << np.uint64(48)) | (zeros << np.uint64(32))) + np.uint64(1)
    at, n_runs, cost = np.uint64(0), 0, np.int64(0)
    for i in range(last + 1):
        seen = counts[i]
        size = seen & np.uint64(0xFFFFFFFF)
        differ = (seen >> np.uint64(48)) & (seen >> np.uint64(32)) & np.uint64(0xFFFF) != np.uint64(0)
        counts[i] = at | (np.uint64(differ) << np.uint64(63))
        runs[0, n_runs], runs[1, n_runs] = np.int64(at), np.int64(at + size)
        n_runs += int(differ)
        cost += np.int64(size * size) if differ else np.int64(0)
        at += size
    if cost > PATIENCE * n:
        rank_by_sorting(row, n, order)
        return
    unsure = np.int64(0)
    for j in range(n):
        begin = counts[bins[j]]
        rank[j] = np.uint32(np.uint32(begin) + rank[j])
        mixed[unsure] = np.uint32(j)
        unsure += np.int64(begin >> np.uint64(63))
    for i in range(unsure):
        place[rank[mixed[i]]] = mixed[i]
    for i in range(n_runs):
        sort_run(bits, place, runs[0, i], runs[1, i])
        for j in range(runs[0, i], runs[1, i]):
            rank[place[j]] = np.uint32(j)


@kernel
def chance(rank: Any, highest: float, step: float) -> float:
    """2^32 times the probability with which `keep_by_rank` keeps the element of a rank; never more for a later rank."""
    return (highest - np.float64(rank) * step) * 4294967296.0


@kernel
def count_bins(bins: np.ndarray, n: int, last: int, counts: np.ndarray, places: np.ndarray) -> None:
    """counts[0, bin] (uint32) = how many of the first half of bins[:n] are in it, counts[1, bin] of the second half.

    places[:n] (uint32) = how many of its bin came before an element in its half. Two counters of a bin, for neighbours are
    often equal, and would wait for each other.
    """
    first, second = counts[0], counts[1]
    for i in range(last + 1):
        first[i] = second[i] = np.uint32(0)
    half = n // 2
    head, tail, before, after = bins[:half], bins[half : 2 * half], places[:half], places[half : 2 * half]
    for j in range(half):
        b, c = head[j], tail[j]
        x, y = first[b], second[c]
        before[j], after[j] = x, y
        first[b], second[c] = np.uint32(x + np.uint32(1)), np.uint32(y + np.uint32(1))
    if n % 2:
        places[n - 1] = second[bins[n - 1]]
        second[bins[n - 1]] += np.uint32(1)


@kernel
def bound_bins(counts: np.ndarray, last: int, highest: float, step: float, lows: np.ndarray, bounds: np.ndarray) -> None:
    """lows[bin] = the rank of its first element, bounds[bin] = what words say of all of its elements; counts by `count_bins`.

    bounds  uint64: words below the lower half keep every element of the bin, words beyond the lower half and the upper half
            together keep none, and for those between them it depends on the rank
    """
    at = np.int64(0)
    for i in range(last + 1):
        size = np.int64(counts[0, i]) + np.int64(counts[1, i])
        if size:
            lows[i] = np.uint32(at)
            most, least = chance(at, highest, step), chance(at + size - 1, highest, step)
            below = np.uint64(min(max(least, 0.0), 4294967295.0))
            beyond = np.uint64(min(max(most, 0.0), 4294967295.0))
            bounds[i] = ((beyond - below) << np.uint64(32)) | below
            at += size
    bounds[last] = np.uint64(0)  # zeros: it does not matter


@kernel
def judge(bins: np.ndarray, words: np.ndarray, n: int, bounds: np.ndarray, marks: np.ndarray) -> None:
    """marks[:n] (uint8) = 1 where `bounds` says that an element is kept, 2 where it depends on its rank, else 0."""
    held = np.empty(CHUNK, np.uint64)  # looking up does not vectorise: apart from what does
    for start in range(0, n, CHUNK):
        m = min(CHUNK, n - start)
        b, w, y, h = bins[start : start + m], words[start : start + m], marks[start : start + m], held[:m]
        for j in range(m):
            h[j] = bounds[b[j]]
        for j in range(m):
            below, span = np.uint32(h[j]), np.uint32(h[j] >> np.uint64(32))
            beyond = np.uint32(w[j] - below) > span  # a word below wraps round
            y[j] = np.uint8(1) if w[j] < below else (np.uint8(0) if beyond else np.uint8(2))


@kernel
def find_long(bits: np.ndarray, bins: np.ndarray, n: int, longs: np.ndarray, mixed: np.ndarray) -> None:
    """found = the indices of the elements with other than zeros in the lower 16 bits, mixed[bin] = 1 for their bins."""
    count = 0
    for start in range(0, n, CHUNK):
        m = min(CHUNK, n - start)
        v, b, ones = bits[start : start + m], bins[start : start + m], np.uint32(0)
        for j in range(m):
            ones = np.uint32(ones | v[j])
        if ones & np.uint32(0xFFFF):  # few chunks have any
            for j in range(m):
                if v[j] & np.uint32(0xFFFF):
                    mixed[b[j]] = np.uint8(1)
                    longs[count] = np.uint32(start + j)
                    count += 1


@kernel
def place_in_bin(bits: np.ndarray, bins: np.ndarray, index: Any, before: Any, longs: np.ndarray, count: int) -> Any:
    """The place of an element in its bin, largest first, where found[:count] are the long elements of the row (`find_long`).

    before  how many of the bin have a lower index

    The others of a bin are equal, and smaller than its long ones.
    """
    value, bin_, place = bits[index], bins[index], 0
    if value & np.uint32(0xFFFF):
        for i in range(count):
            k = longs[i]
            place += int((bins[k] == bin_) & ((bits[k] > value) | ((bits[k] == value) & (k < index))))
        return place
    for i in range(count):
        place += int((bins[longs[i]] == bin_) & (longs[i] > index))
    return place + before


@kernel
def rank_of(bits: np.ndarray, n: int, index: Any) -> Any:
    """The rank of one element."""
    before, after, v = bits[:index], bits[index:n], bits[index]
    count = np.uint32(0)
    for j in range(before.size):
        count = np.uint32(count + np.uint32(before[j] >= v))
    for j in range(after.size):
        count = np.uint32(count + np.uint32(after[j] > v))
    return np.int64(count)


@kernel
def mark_by_rank(
    row: np.ndarray, n: int, highest: float, step: float, words: np.ndarray, bits: np.ndarray, order: np.ndarray
) -> Any:
    """uint8 [n], in order[2]: 1 where `keep_by_rank` keeps an element of row[:n] that is not zero.

    Ranks of a bin differ little, and so do their probabilities: most words decide for all of the bin. The others are ranked by
    what comes before in their bin, if its elements are equal but for few. Else by counting in the whole row, and where that
    would be done often, the row is sorted.
    """
    marks, bins = order[2].view(np.uint8)[:n], order[3].view(np.uint16)[:n]
    last, long = fine_bins(row, n, bits, bins)
    counts, lows, bounds = np.empty((2, FINE_BINS), np.uint32), np.empty(FINE_BINS, np.uint32), np.empty(FINE_BINS, np.uint64)
    places, half = order[1], n // 2
    count_bins(bins, n, last, counts, places)
    bound_bins(counts, last, highest, step, lows, bounds)
    judge(bins, words, n, bounds, marks)
    mixed = np.zeros(last + 1, np.uint8)  # of a bin: 0 its elements are equal, 1 but for long ones, 2 they may be any
    longs = order[2][(n + 3) // 4 :]
    if long > n // 16:
        mixed[:] = np.uint8(2)
    elif long > 0:
        find_long(bits, bins, n, longs, mixed)
    if last == FINE_BINS - 1:
        mixed[last - 1] = np.uint8(2)
    open_, n_open = order[0], np.uint64(0)
    for j in range(n):  # no branch: store always, advance if it depends
        open_[n_open] = np.uint32(j)
        n_open += np.uint64(marks[j] >> np.uint8(1))
    counted = 0
    for i in range(n_open):
        at = np.int64(open_[i])
        b = bins[at]
        place = np.int64(places[at]) + (np.int64(counts[0, b]) if at >= half else 0)
        rank = np.int64(lows[b]) + place
        if mixed[b] == 1:
            rank = np.int64(lows[b]) + place_in_bin(bits, bins, at, place, longs, long)
        elif mixed[b] == 2:
            if counted == MOST_COUNTED:
                rank_by_sorting(row, n, order)
                for k in range(n):
                    marks[k] = np.uint8(np.float64(words[k]) < chance(order[0, k], highest, step))
                break
            counted += 1
            rank = rank_of(bits, n, at)
        marks[at] = np.uint8(np.float64(words[at]) < chance(rank, highest, step))
    return marks


@kernel
def keep_by_rank(
    row: np.ndarray,
    n: int,
    density: float,
    epsilon: float,
    unbiased: bool,
    words: np.ndarray,
    bits: np.ndarray,
    order: np.ndarray,
) -> None:
    """Keep each element with a probability that grows with its rank, from density - epsilon to density + epsilon.

    unbiased  divide what is kept by its probability
    words     uint32 [>= n], the elements' random words
    bits, order  scratch, as for `ranks`

    The only element of a row is kept with probability `density`.
    """
    highest, step = (density + epsilon, 2.0 * epsilon / (n - 1)) if n > 1 else (density, 0.0)
    x, w = row[:n], words[:n]
    if _UNBIASED and unbiased:
        ranks(row, n, bits, order)
        r = order[0][:n]
        for j in range(n):  # in the row's order and without a branch: half of them would be mispredicted
            p = highest - np.float64(r[j]) * step
            value = x[j] / p
            x[j] = value if np.float64(w[j]) < p * 4294967296.0 else 0.0
    elif _BIASED:
        marks = mark_by_rank(row, n, highest, step, words, bits, order)
        for j in range(n):
            x[j] = or_zero(x[j], marks[j] != np.uint8(0))
