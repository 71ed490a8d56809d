"""Exact k-th largest magnitude by radix: the bits of |x| as float32 sort like its value.

One pass counts the high 16 bits, and in the same pass the low 16 bits inside three neighbouring bins, guessed from the first
tile to hold the k-th; if it lies elsewhere, a second pass counts the low bits there. Counts add, so tiles, threads and machines
merge without rounding, and a wrong guess costs time only. bf16 deltas are full of equal magnitudes (7 % of elements sit exactly on a usual threshold),
so the tie rule is part of the result: of the elements equal to the threshold those with the lower flat index are kept, and
exactly k in all. Magnitudes are compared as float32; a NaN counts as larger than anything.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from weightsmith.kernels.codecs import BLOCK, as_bits, decode
from weightsmith.kernels.combine import subtract

HIGH_BINS = 1 << 15  # the sign bit of a magnitude is 0
LOW_BINS = 1 << 16


@njit(nogil=True, cache=True)
def magnitude_bits(row: np.ndarray, n: int, bits: np.ndarray) -> None:
    """bits[:n] (uint32) = bits of float32(|row[:n]|)."""
    x, b = row[:n], bits[:n]
    for j in range(n):
        b[j] = as_bits(x[j]) & np.uint32(0x7FFFFFFF)


@njit(nogil=True, cache=True)
def count(
    raw: np.ndarray,
    codes: np.ndarray,
    i: int,
    n: int,
    first: int,
    high: np.ndarray,
    low: np.ndarray,
    rows: np.ndarray,
    bits: np.ndarray,
) -> None:
    """Histograms of the magnitude bits of model i's deltas, raw[i] - raw[0].

    high   uint32 [HIGH_BINS]: += by the high 16 bits
    first  high bits of the first of the bins whose low bits are counted too
    low    uint32 [bins * LOW_BINS]: += by ((high bits - first), low bits); may have no bins
    rows   scratch [2, BLOCK]; bits uint32 [BLOCK] scratch
    """
    base, x = rows[0], rows[1]
    span = np.uint32(low.size)
    offset = np.uint32(first) << np.uint32(16)
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[0], codes[0], start, m, base)
        decode(raw[i], codes[i], start, m, x)
        subtract(x, base, m)
        magnitude_bits(x, m, bits)
        for j in range(m):
            high[bits[j] >> np.uint32(16)] += np.uint32(1)
        for j in range(m):
            place = np.uint32(bits[j] - offset)  # wraps round below the first bin, to beyond the last
            if place < span:
                low[place] += np.uint32(1)


@njit(nogil=True, cache=True)
def occupied(counts: np.ndarray, places: np.ndarray, numbers: np.ndarray) -> int:
    """Gather the non-zero counters: their places and values, in order; returns how many (stops when places is full)."""
    found = 0
    for b in range(counts.size):
        if counts[b] != 0:
            if found < places.size:
                places[found] = b
                numbers[found] = counts[b]
            found += 1
    return found


@njit(nogil=True, cache=True)
def find_bin(counts: np.ndarray, k: int) -> tuple[int, int]:
    """The bin that holds the k-th largest (k >= 1), and how many elements lie in higher bins."""
    above = np.int64(0)
    b = counts.size - 1
    while b > 0 and above + np.int64(counts[b]) < k:
        above += np.int64(counts[b])
        b -= 1
    return b, above


@njit(nogil=True, cache=True)
def index_of_tie(
    raw: np.ndarray, codes: np.ndarray, i: int, n: int, threshold: int, quota: int, rows: np.ndarray, bits: np.ndarray
) -> int:
    """Index just past the `quota`-th element of model i whose magnitude bits equal `threshold`; n if there are fewer."""
    base, x = rows[0], rows[1]
    left = quota
    if left == 0:
        return 0
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[0], codes[0], start, m, base)
        decode(raw[i], codes[i], start, m, x)
        subtract(x, base, m)
        magnitude_bits(x, m, bits)
        for j in range(m):
            if bits[j] == np.uint32(threshold):
                left -= 1
                if left == 0:
                    return start + j + 1
    return n
