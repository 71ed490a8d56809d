"""Rows to small codes with scales, and back: integers of few bits, floats of 4 (E2M1) and 8 (E4M3), and affine codes.

A group is a run of elements of one row that share a scale; a block has several rows. Codes are x / scale, divided in float32
and rounded to nearest even, and held to the range. A NaN becomes the code of 0, but stays NaN in 8-bit floats. Functions of
groups take flat rows, in which groups follow each other without gaps; of two 4-bit codes in a byte, the first is the low half.

A code becomes a number by a table, or counts steps of a scale. All arithmetic is float32, each operation rounded once, in the
order that the docstrings give.
"""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.codecs import BLOCK, E4M3, E4M3_VALUES, E5M2_VALUES, as_bits, as_float, encode
from weightsmith._kernels.jit import kernel

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""float32 [16]: the value of each 4-bit float."""

TABLES: dict[str, np.ndarray] = {
    "float8": E4M3_VALUES,
    "wide8": E5M2_VALUES,
    "float4": E2M1_VALUES,
    "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    "offset8": np.arange(-128, 128, dtype=np.float32),
    "offset4": np.arange(-8, 8, dtype=np.float32),
}
"""The value of each code, by kind: float32 [256] or [16]. `offset`: the code of an integer is the integer + 2^(bits - 1).
`wide8` is the 8-bit float of the wider range, E5M2."""

LARGEST = np.float32(448)
"""The largest float8_e4m3fn."""

_ROUND = np.float32(1.5 * 2.0**23)
"""Adding it and taking it away again rounds a small float32 to the nearest integer, ties to even: np.rint is a call, and a call
keeps a loop from vectorising."""


@kernel
def quantise_integers(rows: np.ndarray, group: int, scales: np.ndarray, bits: int, offset: int, codes: np.ndarray) -> None:
    """codes = rows / scales as integers of -2^(bits - 1) … 2^(bits - 1) - 1, plus `offset`.

    rows    float32 [n]
    group   elements that share a scale; even for 4 bits
    scales  float32 [n / group], positive
    bits    8 or 4
    codes   uint8 [n · bits / 8]: the low byte or half byte of each
    """
    low, high = np.float32(-(1 << (bits - 1))), np.float32((1 << (bits - 1)) - 1)
    whole = np.empty(group, np.uint8)
    for g in range(scales.size):
        scale, row = scales[g], rows[g * group : (g + 1) * group]
        for j in range(group):
            q = row[j] / scale  # a product with 1 / scale would be rounded twice, and decide some ties otherwise
            q = high if q > high else q
            q = low if q < low else q
            q = q if q == q else np.float32(0)  # NaN
            whole[j] = np.uint8(np.int32((q + _ROUND) - _ROUND) + np.int32(offset))
        _store(whole, bits, g * group, codes)


@kernel
def quantise_float4(rows: np.ndarray, group: int, scales: np.ndarray, codes: np.ndarray) -> None:
    """codes = rows / scales as E2M1: nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code.

    rows    float32 [n]
    group   elements that share a scale, an even number
    scales  float32 [n / group], positive
    codes   uint8 [n / 2]
    """
    whole = np.empty(group, np.uint8)
    for g in range(scales.size):
        scale, row = scales[g], rows[g * group : (g + 1) * group]
        for j in range(group):
            q = row[j] / scale
            a = abs(q)
            # Each comparison is with the middle of two neighbours; a tie goes to the even code, so every other one is >=.
            code = np.uint8(a > np.float32(0.25)) + np.uint8(a >= np.float32(0.75)) + np.uint8(a > np.float32(1.25))
            code += np.uint8(a >= np.float32(1.75)) + np.uint8(a > np.float32(2.5)) + np.uint8(a >= np.float32(3.5))
            code += np.uint8(a > np.float32(5))
            whole[j] = np.uint8(code) + (np.uint8(8) if q < np.float32(0) else np.uint8(0))
        _store(whole, 4, g * group, codes)


@kernel
def quantise_affine(rows: np.ndarray, group: int, scales: np.ndarray, biases: np.ndarray, bits: int, codes: np.ndarray) -> None:
    """codes = (rows - biases) / scales as integers of 0 … 2^bits - 1.

    rows            float32 [n]
    group           elements that share scale and bias; even for 4 bits
    scales, biases  float32 [n / group]; scales are not zero
    bits            8 or 4
    codes           uint8 [n · bits / 8]
    """
    high = np.float32((1 << bits) - 1)
    whole = np.empty(group, np.uint8)
    for g in range(scales.size):
        scale, bias, row = scales[g], biases[g], rows[g * group : (g + 1) * group]
        for j in range(group):
            q = (row[j] - bias) / scale
            q = high if q > high else q
            q = np.float32(0) if q < np.float32(0) else q
            q = q if q == q else np.float32(0)
            whole[j] = np.uint8(np.int32((q + _ROUND) - _ROUND))
        _store(whole, bits, g * group, codes)


@kernel
def _store(whole: np.ndarray, bits: int, first: int, codes: np.ndarray) -> None:
    """Codes of `whole`, from element `first` on."""
    if bits == 8:
        codes[first : first + whole.size] = whole
    else:
        for j in range(whole.size // 2):
            codes[first // 2 + j] = (whole[2 * j] & np.uint8(15)) | np.uint8(whole[2 * j + 1] << np.uint8(4))


@kernel(known={"out": [E4M3]})
def quantise_float8(rows: np.ndarray, cols: int, high: int, wide: int, scales: np.ndarray, codes: np.ndarray) -> None:
    """codes = rows / scales, block by block: divided in float32, held to ±448, rounded to nearest even.

    A cast (`codecs.encode`) gives NaN for what lies beyond ±448.

    rows    float32 [n · cols]: whole bands of `high` rows, the last of which may be shorter
    high    rows of a block, wide columns; the last block of a row or column may be smaller
    scales  float32: of the blocks, in row-major order; positive
    codes   uint8 [n · cols]: float8_e4m3fn
    """
    quotients = np.empty(BLOCK, np.float32)
    across = -(-cols // wide)
    for i in range(rows.size // cols):
        for b in range(across):
            scale, end = scales[i // high * across + b], min((b + 1) * wide, cols)
            for start in range(b * wide, end, BLOCK):
                m = min(BLOCK, end - start)
                first = i * cols + start
                row, block = rows[first : first + m], quotients[:m]
                for j in range(m):
                    q = row[j] / scale
                    q = LARGEST if q > LARGEST else q
                    block[j] = -LARGEST if q < -LARGEST else q
                encode(block, m, E4M3, first, codes)


@kernel
def block_maxima(rows: np.ndarray, cols: int, high: int, wide: int, maxima: np.ndarray) -> None:
    """The largest magnitude of each block of high by wide elements; a NaN does not count, and a block of NaNs gives 0.

    rows    float32 [n · cols]: whole bands of `high` rows, the last of which may be shorter
    maxima  float32 [ceil(n / high) · ceil(cols / wide)]
    """
    across = -(-cols // wide)
    maxima[:] = 0
    for i in range(rows.size // cols):
        for b in range(across):
            row = rows[i * cols + b * wide : i * cols + min((b + 1) * wide, cols)]
            at = i // high * across + b
            top = as_bits(maxima[at])
            for j in range(row.size):  # as integers: magnitudes sort like their bits, and a maximum of integers vectorises
                bits = np.uint32(as_bits(row[j]) & np.uint32(0x7FFFFFFF))
                bits = np.uint32(0) if bits > np.uint32(0x7F800000) else bits
                top = bits if bits > top else top
            maxima[at] = as_float(top)


@kernel
def group_extremes(rows: np.ndarray, group: int, lows: np.ndarray, highs: np.ndarray) -> None:
    """The smallest and the largest element of each group. A NaN does not count.

    rows         float32 [n]
    lows, highs  float32 [n / group]
    """
    for g in range(lows.size):
        row = rows[g * group : (g + 1) * group]
        low, high = np.float32(np.inf), np.float32(-np.inf)
        for j in range(group):
            low = row[j] if row[j] < low else low
            high = row[j] if row[j] > high else high
        lows[g], highs[g] = low, high


@kernel
def dequantise(
    codes: np.ndarray,
    table: np.ndarray,
    first: int,
    cols: int,
    scales: np.ndarray,
    across: int,
    high: int,
    wide: int,
    out: np.ndarray,
) -> None:
    """out = elements first … first + out.size of a matrix [rows, cols] in blocks that have a scale each.

    codes   uint8: of these elements. Of 4-bit codes from the byte that holds element `first`
    table   float32 [256], or [16] for 4-bit codes: the value of each
    scales  float32: of the blocks, `across` in a row, from the row of blocks that holds element `first`
    high    rows of a block, wide columns; the last block of a row or column may be smaller
    out     float32 [n]: value · scale, rounded once
    """
    origin = first // cols // high
    half, skipped = table.size == 16, first & 1
    done = 0
    while done < out.size:
        i, j = (first + done) // cols, (first + done) % cols
        band = (i // high - origin) * across
        end = done + min(out.size - done, cols - j)
        while done < end:
            block = j // wide
            m = min(end - done, (block + 1) * wide - j)
            scale = scales[band + block]
            if half:
                for e in range(done, done + m):
                    at = e + skipped
                    out[e] = table[(codes[at >> 1] >> np.uint8(4 * (at & 1))) & np.uint8(15)] * scale
            else:
                for e in range(done, done + m):
                    out[e] = table[codes[e]] * scale
            done += m
            j += m


# ---- Codes packed into bytes and words


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
def group_costs(
    rows: np.ndarray, group: int, scales: np.ndarray, zeros: np.ndarray, bits: int, costs: np.ndarray, totals: np.ndarray
) -> None:
    """totals = Σ costs · (row - (code - zero) · scale)² of each group, with the codes of `quantise_transposed`.

    rows           float32 [n, cols], finite
    group          elements of a row that share a scale and a zero
    scales, zeros  float32 [n, cols / group]; scales are positive, zeros whole numbers
    bits           codes are held to 0 … 2^bits - 1
    costs          float32 [cols]
    totals         float64 [n, cols / group]: sums of float64, in the order of the columns
    """
    top, zero = np.float32((1 << bits) - 1), np.float32(0)
    for o in range(rows.shape[0]):
        for g in range(scales.shape[1]):
            scale, shift, row, total = scales[o, g], zeros[o, g], rows[o], np.float64(0)
            for j in range(g * group, (g + 1) * group):
                q = np.rint(row[j] / scale) + shift
                q = top if q > top else q
                q = zero if q < zero else q
                error = row[j] - (q - shift) * scale
                total += np.float64(costs[j]) * np.float64(error) * np.float64(error)
            totals[o, g] = total


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
