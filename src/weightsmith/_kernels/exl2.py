"""EXL2: codes of 2 to 8 bits with a scale for each group of input features and each output feature.

Matrices are transposed, as in the format: a row is an input feature, a column an output feature. Loops run over blocks of
`WIDTH` columns, which stay in L1.
"""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.codecs import F16, decode, encode
from weightsmith._kernels.jit import kernel

WIDTH = 128
"""Columns of a block: 64 KiB of float32 in a group of 128 rows."""


@kernel
def best_scale(w: np.ndarray, which: np.ndarray, scales: np.ndarray, bits: int, unit: float, start: int) -> int:
    """The index in `scales` with the smallest Σ |rounded - w|^3.5; of equal ones the lowest.

    w       float32 [r, n]: the rows of a group
    which   uint8 [n]: the scale code of each column
    scales  float32 [m, 16]: candidates for the scale of each code
    unit    1 / the order of magnitude of w
    start   the index to begin with. A good guess saves time: a candidate is dropped once its sum exceeds the smallest

    Each column's sum is float32, the total float64.
    """
    most, n = scales.shape[0], w.shape[1]
    low, high = np.float32(-(1 << (bits - 1))), np.float32((1 << (bits - 1)) - 1)
    factor, zero = np.float32(unit), np.float32(0)
    best, best_index = np.inf, start
    s, inverse, sums = np.empty(WIDTH, np.float32), np.empty(WIDTH, np.float32), np.empty(WIDTH, np.float32)
    for step in range(2 * most):
        at = start + (step + 1) // 2 if step % 2 else start - step // 2
        if at < 0 or at >= most:
            continue
        total = 0.0
        for first in range(0, n, WIDTH):
            m = min(WIDTH, n - first)
            for j in range(m):
                s[j] = scales[at, which[first + j]]
                inverse[j] = np.float32(1) / s[j] if s[j] > zero else zero
                sums[j] = zero
            for k in range(w.shape[0]):
                row = w[k, first : first + m]
                for j in range(m):
                    q = row[j] * inverse[j]
                    q = low if q < low else q
                    q = np.rint(high if q > high else q)
                    e = abs(q * s[j] - row[j]) * factor
                    sums[j] += e * e * e * np.sqrt(e)
            for j in range(m):
                total += np.float64(sums[j])
            if total > best:
                break
        if total < best or (total == best and at < best_index):
            best, best_index = total, at
    return best_index


@kernel(known={"in": [F16], "out": [F16]})
def quantise_rows(
    w: np.ndarray,
    scales: np.ndarray,
    which: np.ndarray,
    bits: int,
    half: bool,
    factor: np.ndarray,
    codes: np.ndarray,
    errors: np.ndarray,
) -> None:
    """Round rows to codes, one after another; each row's error is taken into account by the rows after it.

    w       float32 [r, n]; changed
    scales  float32 [groups, n]; where one is 0, the code is that of 0
    which   int64 [r]: the row of `scales` for each row
    bits    of a code
    half    whether readers round code · scale to float16
    factor  float32 [r, r], upper triangular: a block of U, where UᵀU is the inverse of the Hessian; [0, 0]: plain rounding
    codes   uint8 [r, n]: code + 2^(bits - 1)
    errors  float32 [r, n]: (w - rounded) / U[k, k]; [0, 0] for plain rounding
    """
    r, n = w.shape
    low, high = np.float32(-(1 << (bits - 1))), np.float32((1 << (bits - 1)) - 1)
    zero = np.float32(0)
    rounded, raw = np.empty(WIDTH, np.float32), np.empty(2 * WIDTH, np.uint8)
    for first in range(0, n, WIDTH):
        m = min(WIDTH, n - first)
        for k in range(r):
            row, s, out = w[k, first : first + m], scales[which[k], first : first + m], codes[k, first : first + m]
            for j in range(m):
                q = row[j] / s[j] if s[j] > zero else zero
                q = low if q < low else q
                q = np.rint(high if q > high else q)
                rounded[j] = q * s[j]
                out[j] = np.uint8(q - low)
            if factor.size == 0:
                continue
            if half:  # the later rows make up for the error of the weight that a reader of float16 has
                encode(rounded, m, F16, 0, raw)
                decode(raw, F16, 0, m, rounded)
            error, pivot = errors[k, first : first + m], factor[k, k]
            for j in range(m):
                error[j] = (row[j] - rounded[j]) / pivot
            for i in range(k + 1, r):
                later, u = w[i, first : first + m], factor[k, i]
                for j in range(m):
                    later[j] -= u * error[j]


@kernel(known={"out": [F16]})
def dequantise(
    words: np.ndarray, bits: np.ndarray, rows: np.ndarray, scales: np.ndarray, order: np.ndarray, out: np.ndarray
) -> None:
    """The weights of some output features, as the loader computes them: float16(code · scale).

    words   uint32 [packed rows, n]
    bits    int64 [groups]
    rows    int64 [groups]: input features of each group
    scales  float32 [groups, n]
    order   int64 [K]: the input feature of each row of codes
    out     uint8 [n, 2 K]: float16 [n, K]
    """
    n, width = words.shape[1], 64
    values = np.empty(width, np.float32)
    raw = np.empty(2 * width, np.uint8)
    for first in range(0, n, width):
        m = min(width, n - first)
        top, k = 0, 0
        for g in range(bits.size):
            b = bits[g]
            mask, zero = np.uint32((1 << b) - 1), np.float32(1 << (b - 1))
            for t in range(rows[g]):
                at, shift = top + t * b // 32, np.uint32(t * b % 32)
                unread = np.uint32(32 - shift)  # bits of this word from `shift` on
                for j in range(m):
                    code = words[at, first + j] >> shift
                    if unread < b:
                        code |= words[at + 1, first + j] << unread
                    values[j] = (np.float32(np.uint32(code) & mask) - zero) * scales[g, first + j]
                encode(values, m, F16, 0, raw)  # the loader keeps weights in float16
                column = order[k]
                for j in range(m):
                    out[first + j, 2 * column] = raw[2 * j]
                    out[first + j, 2 * column + 1] = raw[2 * j + 1]
                k += 1
            top += rows[g] * b // 32
