"""Random numbers of an element: the words that masks compare, and normal noise.

A word is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a function of a 64-bit key and the
element's index alone, so results do not depend on tiles, threads, order or machine. Element e takes word (e // 64) % 4 of
counter 64 * (e // 256) + e % 64: the four words of 64 neighbouring counters lie in four contiguous runs, which LLVM vectorises
(0.7 ns an element on AVX2).

A normal number is the inverse of the distribution function at a uniform one, of one word (Wichura 1988, "Algorithm AS 241: the
percentage points of the normal distribution", PPND16): elementary operations alone, so it is the same on any machine. It is
added to the weights of an expert, and replaces rows or columns that are drawn anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from weightsmith._kernels.codecs import BLOCK, Encoded, decode, encode
from weightsmith._kernels.jit import kernel

RUN = 256
"""Elements that 64 counters serve."""


@kernel
def philox_run(key: int, counter: int, words: np.ndarray) -> None:
    """words[0:256] (uint32) = the four words of counters counter … counter + 63."""
    first, second, third, fourth = words[:64], words[64:128], words[128:192], words[192:256]
    key0 = np.uint32(key)
    key1 = np.uint32(np.uint64(key) >> np.uint64(32))
    base = np.uint64(counter)
    for j in range(64):
        c = base + np.uint64(j)
        x0, x1, x2, x3 = np.uint32(c), np.uint32(c >> np.uint64(32)), np.uint32(0), np.uint32(0)
        k0, k1 = key0, key1
        for _ in range(10):
            p0 = np.uint64(0xD2511F53) * np.uint64(x0)
            p1 = np.uint64(0xCD9E8D57) * np.uint64(x2)
            x0 = np.uint32(np.uint32(p1 >> np.uint64(32)) ^ x1 ^ k0)
            x2 = np.uint32(np.uint32(p0 >> np.uint64(32)) ^ x3 ^ k1)
            x1, x3 = np.uint32(p1), np.uint32(p0)
            k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
            k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
        first[j], second[j], third[j], fourth[j] = x0, x1, x2, x3


@kernel
def random_words(key: int, index: int, n: int, words: np.ndarray) -> int:
    """Fill `words` (uint32 [>= n + 512]) so that words[offset + j] belongs to element index + j; return offset."""
    offset = index % RUN
    runs = (offset + n + RUN - 1) // RUN
    counter = (index // RUN) * 64
    for r in range(runs):
        philox_run(key, counter + 64 * r, words[r * RUN : (r + 1) * RUN])
    return offset


_LN2 = 0.6931471805599453


@kernel
def log(x: Any) -> np.float64:
    """The logarithm of a positive normal float64, to 2 ulp: log m + e · log 2, with log m = 2 artanh((m - 1) / (m + 1)).

    libm's is another number from one version to the next.
    """
    bits = np.float64(x).view(np.int64)
    e = (bits >> np.int64(52)) - np.int64(1023)
    m = np.int64((bits & np.int64(0x000FFFFFFFFFFFFF)) | np.int64(0x3FF0000000000000)).view(np.float64)
    if m > 1.4142135623730951:
        m, e = m * 0.5, e + np.int64(1)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = 1.0 / 21
    for k in range(9, -1, -1):
        series = 1.0 / (2 * k + 1) + z * series
    return np.float64(np.float64(e) * _LN2 + 2.0 * s * series)


@kernel
def normal(word: Any) -> np.float64:
    """The normal number of a random word: at most 6.4 from 0."""
    u = (np.float64(word) + 0.5) * 2.0**-32
    q = u - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        a = 2509.0809287301226727 * r + 33430.575583588128105
        a = (((a * r + 67265.770927008700853) * r + 45921.953931549871457) * r + 13731.693765509461125) * r
        a = ((a + 1971.5909503065514427) * r + 133.14166789178437745) * r + 3.387132872796366608
        b = 5226.495278852854561 * r + 28729.085735721942674
        b = (((b * r + 39307.89580009271061) * r + 21213.794301586595867) * r + 5394.1960214247511077) * r
        b = ((b + 687.1870074920579083) * r + 42.313330701600911252) * r + 1.0
        return np.float64(q * a / b)
    r = np.sqrt(-log(min(u, 1.0 - u))) - 1.6
    a = 7.7454501427834140764e-4 * r + 0.0227238449892691845833
    a = (((a * r + 0.24178072517745061177) * r + 1.27045825245236838258) * r + 3.64784832476320460504) * r
    a = ((a + 5.7694972214606914055) * r + 4.6303378461565452959) * r + 1.42343711074968357734
    b = 1.05075007164441684324e-9 * r + 5.475938084995344946e-4
    b = (((b * r + 0.0151986665636164571966) * r + 0.14810397642748007459) * r + 0.68976733498510000455) * r
    b = ((b + 1.6763848301838038494) * r + 2.05319162663775882187) * r + 1.0
    return np.float64(a / b if q > 0 else -a / b)


@kernel
def add_noise(
    key: int, mask_key: int, limit: int, scale: float, first: int, n: int, row: np.ndarray, words: np.ndarray
) -> None:
    """row[:n] += scale · normal numbers, on the elements whose word of `mask_key` is below `limit` (2³²: on all).

    row    float64 [>= n], of elements first …
    words  uint32 [2, >= n + 512] scratch
    """
    a = words[0, random_words(key, first, n, words[0]) :]
    if limit >= 4294967296:
        for j in range(n):
            row[j] += scale * normal(a[j])
        return
    b = words[1, random_words(mask_key, first, n, words[1]) :]
    for j in range(n):
        if np.int64(b[j]) < limit:
            row[j] += scale * normal(a[j])


class NoiseScratch(NamedTuple):
    """row float64 [BLOCK], words uint32 [2, BLOCK + 512]."""

    row: np.ndarray
    words: np.ndarray


class Noise(NamedTuple):
    """Keys (uint64), limit and scale: see `add_noise`. Scale 0: none."""

    key: Any
    mask_key: Any
    limit: int
    scale: float


class Neurons(NamedTuple):
    """Chosen rows or columns of a matrix [rows, cols]: chosen uint8 [rows] or [cols], or [0] for none."""

    chosen: np.ndarray
    by_rows: bool
    cols: int


class Redraw(NamedTuple):
    """Normal numbers that replace chosen neurons: their key (uint64), mean and standard deviation."""

    key: Any
    neurons: Neurons
    mean: float
    deviation: float


@kernel(weight_code="in", out_code="out")
def perturb(
    weight: Encoded, first: int, n: int, noise: Noise, redraw: Redraw, factor: float, out: Encoded, scratch: NoiseScratch
) -> None:
    """out = factor · (W + noise), some rows or columns of it drawn anew; elements first … first + n."""
    key, mask_key, limit, scale = noise
    draw_key, neurons, mean, deviation = redraw
    chosen, by_rows, cols = neurons
    row, words = scratch
    for start in range(0, n, BLOCK):
        m, at = min(BLOCK, n - start), first + start
        decode(weight.data, weight.code, start, m, row)
        if scale != 0.0:
            add_noise(key, mask_key, limit, scale, at, m, row, words)
        if chosen.size:
            w = words[0, random_words(draw_key, at, m, words[0]) :]
            for j in range(m):
                if chosen[(at + j) // cols if by_rows else (at + j) % cols]:
                    row[j] = mean + deviation * normal(w[j])
        if factor != 1.0:
            for j in range(m):
                row[j] *= factor
        encode(row, m, out.code, start, out.data)


@kernel(weight_code="in")
def chosen_sums(weight: Encoded, first: int, n: int, grain: int, neurons: Neurons, out: np.ndarray, row: np.ndarray) -> None:
    """out[g] (float64 [grains, 2]) = sum and sum of squares of the chosen elements of grain g; `first` begins a grain.

    row float64 [BLOCK] scratch
    """
    chosen, by_rows, cols = neurons
    for g in range(out.shape[0]):
        end = min(n, (g + 1) * grain)
        total, squares = 0.0, 0.0  # one after the other: a grain is a unit, so the order is that of the elements on any machine
        for start in range(g * grain, end, BLOCK):
            m = min(BLOCK, end - start)
            decode(weight.data, weight.code, start, m, row)
            for j in range(m):
                at = first + start + j
                if chosen[at // cols if by_rows else at % cols]:
                    total += row[j]
                    squares += row[j] * row[j]
        out[g, 0], out[g, 1] = total, squares
