"""Integer codes of a few bits to float32: those of bitsandbytes, of packed rows, and of transposed matrices; and back.

A code is looked up in a table, or counts steps of a scale. All arithmetic is float32, each operation rounded once, in the order
that the docstrings give.
"""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.jit import kernel


@kernel
def dequantise_nibbles(
    codes: np.ndarray, first: int, table: np.ndarray, block: int, scales: np.ndarray, out: np.ndarray
) -> None:
    """out = table[code] · scale, for elements first … first + out.size of a flat weight.

    codes   uint8: from the byte of element `first`; of two elements in a byte, the first is in the high half
    table   float32 [16]
    block   elements that share a scale
    scales  float32: from the block of element `first`
    out     float32 [n]
    """
    origin, block_origin = first // 2, first // block
    done = 0
    while done < out.size:
        b = (first + done) // block
        scale = scales[b - block_origin]
        end = min(out.size, (b + 1) * block - first)
        for e in range(done, end):
            i = first + e
            byte = int(codes[i // 2 - origin])
            out[e] = table[(byte >> (4 - i % 2 * 4)) & 15] * scale
        done = end


@kernel
def unpack_down(words: np.ndarray, cols: int, bits: int, codes: np.ndarray) -> None:
    """Codes packed along the rows of a matrix: each column is a stream of bits, the lowest bit of a word first.

    words  uint32 [words of a column · cols]
    codes  uint8 [n · cols]: a code may begin in one word and end in the next
    """
    mask = np.uint32((1 << bits) - 1)
    for j in range(codes.size // cols):
        word, shift = j * bits // 32, np.uint32(j * bits % 32)
        low, out = words[word * cols : (word + 1) * cols], codes[j * cols : (j + 1) * cols]
        if shift + bits <= 32:
            for o in range(cols):
                out[o] = np.uint8((low[o] >> shift) & mask)
        else:
            high = words[(word + 1) * cols : (word + 2) * cols]
            for o in range(cols):
                out[o] = np.uint8((low[o] >> shift | high[o] << (np.uint32(32) - shift)) & mask)


@kernel
def pack_down(codes: np.ndarray, bits: int, words: np.ndarray) -> None:
    """Codes as bits: each column is a stream of its own, code after code, the lowest bit of a word first.

    codes  uint8 [r, n]
    words  uint32 [r · bits / 32, n]
    """
    words[:] = np.uint32(0)
    for k in range(codes.shape[0]):
        at, shift = k * bits // 32, k * bits % 32
        for j in range(codes.shape[1]):
            words[at, j] |= np.uint32(codes[k, j]) << np.uint32(shift)
        if shift + bits > 32:
            for j in range(codes.shape[1]):
                words[at + 1, j] |= np.uint32(codes[k, j]) >> np.uint32(32 - shift)


@kernel
def unpack_nibbles(words: np.ndarray, order: np.ndarray, codes: np.ndarray) -> None:
    """Eight codes of 4 bits in each word: code i of them is nibble order[i], of which nibble 0 is the lowest.

    words  uint32 [n]
    order  uint32 [8]
    codes  uint8 [8 · n]
    """
    for k in range(words.size):
        word, out = words[k], codes[8 * k : 8 * k + 8]
        for i in range(8):
            out[i] = np.uint8(word >> (order[i] * np.uint32(4)) & np.uint32(15))


@kernel
def pack_nibbles(codes: np.ndarray, order: np.ndarray, words: np.ndarray) -> None:
    """The inverse of `unpack_nibbles`.

    codes  uint8 [8 · n], of 0 … 15
    order  uint32 [8]
    words  uint32 [n]
    """
    for k in range(words.size):
        word, eight = np.uint32(0), codes[8 * k : 8 * k + 8]
        for i in range(8):
            word |= np.uint32(eight[i]) << (order[i] * np.uint32(4))
        words[k] = word


@kernel
def quantise_transposed(
    rows: np.ndarray, group: int, scales: np.ndarray, zeros: np.ndarray, bits: int, codes: np.ndarray
) -> None:
    """codes = rows / scales + zeros, transposed: the quotient is rounded to the nearest integer, ties to even; NaN counts as 0.

    rows           float32 [n, cols]
    group          elements of a row that share a scale and a zero
    scales, zeros  float32 [n, cols / group]; scales are positive, zeros whole numbers
    bits           codes are held to 0 … 2^bits - 1
    codes          uint8 [cols, n]
    """
    n, cols = rows.shape
    top, zero = np.float32((1 << bits) - 1), np.float32(0)
    for g in range(cols // group):
        for o in range(n):
            scale, shift, row = scales[o, g], zeros[o, g], rows[o]
            for j in range(g * group, (g + 1) * group):
                q = row[j] / scale
                q = np.rint(q if q == q else zero) + shift
                q = top if q > top else q
                codes[j, o] = np.uint8(zero if q < zero else q)


@kernel
def dequantise_transposed(
    codes: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    groups: np.ndarray,
    top: int,
    first: int,
    out: np.ndarray,
) -> None:
    """out = (code - zero) · scale, for those of the outputs top … top + c that are among elements first … first + out.size.

    codes   uint8 [inputs · c]
    zeros   uint8 [groups · c], and so are the scales, float32
    groups  int64 [inputs]: the group of each input
    out     float32 [n]: elements of the weight [outputs, inputs], row-major
    """
    inputs = groups.size
    c = codes.size // inputs
    for o in range(c):
        row = (top + o) * inputs - first
        for j in range(max(0, -row), min(inputs, out.size - row)):
            g = groups[j] * c + o
            out[row + j] = np.float32(np.int32(codes[j * c + o]) - np.int32(zeros[g])) * scales[g]


@kernel
def dequantise_rows(
    words: np.ndarray,
    width: int,
    bits: int,
    table: np.ndarray,
    group: int,
    scales: np.ndarray,
    biases: np.ndarray,
    first: int,
    out: np.ndarray,
) -> None:
    """out = table[code] · scale + bias, for elements first … first + out.size of rows that are packed along their columns.

    words   uint32 [rows · width]: each row is a stream of bits, the lowest bit of a word first
    table   float32 [2 ** bits]
    group   columns that share a scale and a bias
    scales  float32 [rows · groups of a row], and so are the biases
    first   counted from the first of these rows; each has 32 · width / bits columns
    out     float32 [n]: the product and the sum are rounded
    """
    mask = np.uint32((1 << bits) - 1)
    cols = 32 * width // bits
    done = 0
    while done < out.size:
        row, col = (first + done) // cols, (first + done) % cols
        stream = words[row * width : (row + 1) * width]
        m = min(out.size - done, cols - col, group - col % group)
        part = out[done : done + m]
        g = row * (cols // group) + col // group
        scale, bias = scales[g], biases[g]
        for e in range(m):
            bit = (col + e) * bits
            word, shift = bit >> 5, np.uint32(bit & 31)
            code = stream[word] >> shift
            if shift + bits > 32:
                code = code | stream[word + 1] << (np.uint32(32) - shift)
            part[e] = table[code & mask] * scale + bias
        done += m
