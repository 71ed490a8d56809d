"""Exact k-th largest magnitude by radix: the bits of |x| as float32 sort like its value.

Pass 1 counts the high 16 bits, pass 2 the low 16 bits inside the bin that holds the k-th. Counts add, so tiles, threads and
machines merge without rounding. bf16 deltas are full of equal magnitudes (7 % of elements sit exactly on a usual threshold),
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
def count_high(raw: np.ndarray, codes: np.ndarray, i: int, n: int, counts: np.ndarray, rows: np.ndarray, bits: np.ndarray) -> None:
    """counts[b] += deltas of model i (raw[i] - raw[0]) whose magnitude bits begin with b; counts uint32 [HIGH_BINS]."""
    base, x = rows[0], rows[1]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[0], codes[0], start, m, base)
        decode(raw[i], codes[i], start, m, x)
        subtract(x, base, m)
        magnitude_bits(x, m, bits)
        for j in range(m):
            counts[bits[j] >> np.uint32(16)] += np.uint32(1)


@njit(nogil=True, cache=True)
def count_low(
    raw: np.ndarray, codes: np.ndarray, i: int, n: int, high: int, counts: np.ndarray, rows: np.ndarray, bits: np.ndarray
) -> None:
    """counts[b] += deltas of model i whose magnitude bits are `high` followed by b; counts uint32 [LOW_BINS]."""
    base, x = rows[0], rows[1]
    for start in range(0, n, BLOCK):
        m = min(BLOCK, n - start)
        decode(raw[0], codes[0], start, m, base)
        decode(raw[i], codes[i], start, m, x)
        subtract(x, base, m)
        magnitude_bits(x, m, bits)
        for j in range(m):
            if bits[j] >> np.uint32(16) == np.uint32(high):
                counts[bits[j] & np.uint32(0xFFFF)] += np.uint32(1)


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
