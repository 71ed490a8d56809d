"""Where a tensor holds what is no number."""

from __future__ import annotations

import numpy as np

from weightsmith.kernels.codecs import BF16, E4M3, F16, F32, F64
from weightsmith.kernels.jit import kernel


@kernel
def first_nonfinite(raw: np.ndarray, code: int, n: int) -> int:
    """Index of the first NaN or infinity among n elements of a byte buffer; -1 when there is none.

    A count first: it vectorises, and almost always is the whole answer.
    """
    if code == BF16 or code == F16:
        mask = np.uint16(0x7F80) if code == BF16 else np.uint16(0x7C00)
        small = raw.view(np.uint16)[:n]
        found = np.uint32(0)
        for j in range(n):
            found = np.uint32(found + np.uint32((small[j] & mask) == mask))
        if found == 0:
            return -1
        for j in range(n):
            if (small[j] & mask) == mask:
                return j
    elif code == F32:
        single = raw.view(np.uint32)[:n]
        found = np.uint32(0)
        for j in range(n):
            found = np.uint32(found + np.uint32((single[j] & np.uint32(0x7F800000)) == np.uint32(0x7F800000)))
        if found == 0:
            return -1
        for j in range(n):
            if (single[j] & np.uint32(0x7F800000)) == np.uint32(0x7F800000):
                return j
    elif code == F64:
        double = raw.view(np.float64)[:n]
        for j in range(n):
            if not np.isfinite(double[j]):
                return j
    else:
        limit = np.uint8(0x7F) if code == E4M3 else np.uint8(0x7C)
        for j in range(n):
            if (raw[j] & np.uint8(0x7F)) >= limit:
                return j
    return -1
