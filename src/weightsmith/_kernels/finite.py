"""Where a tensor holds what is no number."""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.codecs import BF16, BF16_IN, E4M3, E4M3_IN, E5M2_IN, F16, F16_IN, F32, F32_IN, F64, F64_IN
from weightsmith._kernels.jit import kernel


@kernel(code="in")
def first_nonfinite(raw: np.ndarray, code: int, n: int) -> int:
    """Index of the first NaN or infinity among n elements of a byte buffer; -1 when there is none.

    The largest magnitude first, as an integer: that vectorises, and almost always is the whole answer.
    """
    if (BF16_IN or F16_IN) and (code == BF16 or code == F16):
        limit = np.uint16(0x7F80) if code == BF16 else np.uint16(0x7C00)
        small = raw.view(np.uint16)[:n]
        top = np.uint16(0)
        for j in range(n):
            magnitude = np.uint16(small[j] & np.uint16(0x7FFF))
            top = magnitude if magnitude > top else top
        if top >= limit:
            for j in range(n):
                if np.uint16(small[j] & np.uint16(0x7FFF)) >= limit:
                    return j
    elif F32_IN and code == F32:
        single = raw.view(np.uint32)[:n]
        largest = np.uint32(0)
        for j in range(n):
            bits = np.uint32(single[j] & np.uint32(0x7FFFFFFF))
            largest = bits if bits > largest else largest
        if largest >= np.uint32(0x7F800000):
            for j in range(n):
                if np.uint32(single[j] & np.uint32(0x7FFFFFFF)) >= np.uint32(0x7F800000):
                    return j
    elif F64_IN and code == F64:
        double = raw.view(np.float64)[:n]
        for j in range(n):
            if not np.isfinite(double[j]):
                return j
    elif E4M3_IN or E5M2_IN:
        eight = np.uint8(0x7F) if code == E4M3 else np.uint8(0x7C)
        for j in range(n):
            if (raw[j] & np.uint8(0x7F)) >= eight:
                return j
    return -1
