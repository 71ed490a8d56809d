"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

The word of an element is a function of a 64-bit key and the element's index alone, so masks do not depend on tiles, threads,
order or machine. Element e takes word (e // 64) % 4 of counter 64 * (e // 256) + e % 64: the four words of 64 neighbouring
counters lie in four contiguous runs, which LLVM vectorises (0.7 ns an element on AVX2).
"""

from __future__ import annotations

import numpy as np

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
