"""EXL3's weights: codes of a trellis to float32, and the rotation of blocks of 128 x 128.

A tile of 16 x 16 weights is a circular stream of bits. Each weight adds K of them, or even ones add K and odd ones K + 1.
The 16 bits up to those of a weight are its index in a table of 65,536, so neighbours share bits. The weights of a tile come in
the order in which a GPU's tensor cores hold them. A block of 8 x 8 tiles is then rotated from both sides by a Hadamard matrix.

**The search** finds, for each tile, the stream of bits whose values are closest to its weights. A stream is a path. Its state
at a weight is the 16 bits up to those that the weight adds; they name the weight's value. The states of neighbours share all
other bits, and the best path to each of these *overlaps* needs only the best paths to those before (Viterbi 1967). Each weight
has 65,536 states, whatever its number of bits.

Values, weights and the costs of paths are integers there, so results are the same on every machine: int16 in units of `scale`,
differences of at most 127 units, and uint16 for costs, which are relative to the smallest. A vector of 256 bits then holds 16
states. Where weights add 7 or 8 bits, values near a weight in the tails are too far from it for this; then all are integers of
32 bits. Costs are kept for all weights; which overlap came before is computed again on the way back, for one path.

The stream is circular: the first weights share bits with the last. A first search over the weights around the start chooses the
overlap there; the second begins and ends with it.
"""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.jit import kernel

# ---- codes to weights, and the rotation


def _places() -> np.ndarray:
    """int64 [256]: 128 · input + output, inside a block, of each weight of a tile."""
    t = np.arange(256)
    lane, j = t // 8, t % 8
    row = lane % 4 * 2 + np.array([0, 1, 8, 9])[j % 4]
    col = lane // 4 + 8 * (j // 4)
    return row * 128 + col


PLACES = _places()


@kernel
def _decode_tiles(words: np.ndarray, bits: np.ndarray, table: np.ndarray, block: np.ndarray) -> None:
    """block [128 inputs, 128 outputs] = the values of 8 x 8 tiles; arguments as for `dequantise_trellis`."""
    count = 4 * (bits[0] + bits[1])
    for tile in range(64):
        stream = words[tile * count : (tile + 1) * count]
        origin = (tile >> 3) * 16 * 128 + (tile & 7) * 16
        window, unread, at = np.uint64(stream[count - 1]), 0, 0  # the stream is circular: before its first bits come its last
        for t in range(256):
            k = bits[t & 1]
            if unread < k:
                window = window << np.uint64(32) | np.uint64(stream[at])
                at += 1
                unread += 32
            unread -= k
            block[origin + PLACES[t]] = table[np.int64(window >> np.uint64(unread) & np.uint64(0xFFFF))]


@kernel
def _rotate(block: np.ndarray) -> None:
    """Each column of the block [128, 128] times the Hadamard matrix in Sylvester's order, without its factor 1 / √128.

    Butterflies over 1, 2, 4, … 64 rows; two of these stages at a time halve the memory traffic.
    """
    for half in (1, 4, 16):
        for start in range(0, 128, 4 * half):
            for i in range(start, start + half):
                p, step = 128 * i, 128 * half
                a, b = block[p : p + 128], block[p + step : p + step + 128]
                c, d = block[p + 2 * step : p + 2 * step + 128], block[p + 3 * step : p + 3 * step + 128]
                for o in range(128):
                    w, x, y, z = a[o] + b[o], a[o] - b[o], c[o] + d[o], c[o] - d[o]
                    a[o] = w + y
                    b[o] = x + z
                    c[o] = w - y
                    d[o] = x - z
    for i in range(64):
        a, b = block[128 * i : 128 * (i + 1)], block[128 * (i + 64) : 128 * (i + 65)]
        for o in range(128):
            x, y = a[o], b[o]
            a[o] = x + y
            b[o] = x - y


@kernel
def dequantise_trellis(
    words: np.ndarray,
    bits: np.ndarray,
    table: np.ndarray,
    input_scales: np.ndarray,
    output_scales: np.ndarray,
    first_output: int,
    first_input: int,
    shape: tuple[int, int],
    first: int,
    out: np.ndarray,
) -> None:
    """out = input scale · (H · codes · H) · output scale, for 128 outputs and a multiple of 128 inputs.

    words          uint32: rows of 8 tiles, of 16 inputs each; the highest bit of a word first
    bits           int64 [2]: that even and odd weights add, 1 to 8 each
    table          float32 [65536]
    input_scales   float32 [inputs of these rows]
    output_scales  float32 [128]
    first_output   of these outputs
    first_input    of these inputs, a multiple of 128
    shape          outputs and inputs of the weight without padding
    first          of the elements first … first + out.size of the weight, row-major; those among these outputs and inputs are
                   written
    out            float32 [n]: each sum of a butterfly is rounded, then · input scale, · output scale, · 1 / 128
    """
    rotated, block = np.empty(128 * 128, np.float32), np.empty(128 * 128, np.float32)
    outputs, inputs = shape
    size = 256 * (bits[0] + bits[1])
    for b in range(input_scales.size // 128):
        _decode_tiles(words[b * size : (b + 1) * size], bits, table, rotated)
        _rotate(rotated)
        for i in range(128):
            for o in range(128):
                block[o * 128 + i] = rotated[i * 128 + o]
        _rotate(block)
        scales = input_scales[b * 128 : (b + 1) * 128]
        origin = first_input + b * 128
        for o in range(min(128, outputs - first_output)):
            row = (first_output + o) * inputs + origin - first
            scale = output_scales[o]
            for i in range(max(0, -row), min(128, inputs - origin, out.size - row)):
                # 1 / 128 is a power of two: it rounds nothing. Two rotations each lack their factor 1 / √128.
                out[row + i] = block[o * 128 + i] * scales[i] * scale * np.float32(1 / 128)


@kernel
def rotate_rows(rows: np.ndarray, input_factors: np.ndarray, output_factors: np.ndarray, out: np.ndarray) -> None:
    """out = H · (rows · input factor · output factor)ᵀ · H, the way back from `dequantise_trellis`.

    rows            float32 [n, inputs]: at most 128 outputs; the others, and padded inputs, are zeros
    input_factors   float32 [inputs, padded to a multiple of 128]
    output_factors  float32 [128]
    out             float32 [inputs, padded; 128]
    """
    rotated, block = np.empty(128 * 128, np.float32), np.empty(128 * 128, np.float32)
    high, wide = rows.shape
    for first in range(0, input_factors.size, 128):
        block[:] = np.float32(0)
        for o in range(high):
            for i in range(min(128, wide - first)):
                block[o * 128 + i] = rows[o, first + i] * input_factors[first + i] * output_factors[o]
        _rotate(block)
        for i in range(128):
            for o in range(128):
                rotated[i * 128 + o] = block[o * 128 + i]
        _rotate(rotated)
        for i in range(128):
            for o in range(128):
                out[first + i, o] = rotated[i * 128 + o] * np.float32(1 / 128)


# ---- the search


@kernel
def _least_of_2(best: np.ndarray, values: np.ndarray, costs: np.ndarray, w: int, farthest: int) -> None:
    """As `_least_of_8`, for two rows."""
    narrow, wide, n = values.dtype.type, costs.dtype.type, np.uint64(best.size)
    for r in range(n):
        b = best[r]
        for k in range(2):
            i = r + np.uint64(k) * n
            d = narrow(values[i] - w)
            d = narrow(-d) if d < 0 else d
            d = farthest if d > farthest else d
            c = wide(costs[i] + wide(wide(d) * wide(d)))
            b = c if c < b else b
        best[r] = b


@kernel
def _least_of_4(best: np.ndarray, values: np.ndarray, costs: np.ndarray, w: int, farthest: int) -> None:
    """As `_least_of_8`, for four rows."""
    narrow, wide, n = values.dtype.type, costs.dtype.type, np.uint64(best.size)
    for r in range(n):
        b = best[r]
        for k in range(4):
            i = r + np.uint64(k) * n
            d = narrow(values[i] - w)
            d = narrow(-d) if d < 0 else d
            d = farthest if d > farthest else d
            c = wide(costs[i] + wide(wide(d) * wide(d)))
            b = c if c < b else b
        best[r] = b


@kernel
def _least_of_8(best: np.ndarray, values: np.ndarray, costs: np.ndarray, w: int, farthest: int) -> None:
    """best [n] = its minimum with costs + (values - w)², eight rows of n each. The loop over rows is unrolled."""
    narrow, wide, n = values.dtype.type, costs.dtype.type, np.uint64(best.size)
    for r in range(n):
        b = best[r]
        for k in range(8):
            i = r + np.uint64(k) * n
            d = narrow(values[i] - w)
            d = narrow(-d) if d < 0 else d
            d = farthest if d > farthest else d
            c = wide(costs[i] + wide(wide(d) * wide(d)))
            b = c if c < b else b
        best[r] = b


@kernel
def _least_of_same(
    best: np.ndarray, values: np.ndarray, stride: int, costs: np.ndarray, step: int, w: int, farthest: int
) -> None:
    """best [n] = its minimum with cost + (values - w)²: eight runs of n values, `stride` apart, with one cost for each run."""
    narrow, wide, n, s = values.dtype.type, costs.dtype.type, np.uint64(best.size), np.uint64(stride)
    c0, c1, c2, c3 = costs[0], costs[step], costs[2 * step], costs[3 * step]
    c4, c5, c6, c7 = costs[4 * step], costs[5 * step], costs[6 * step], costs[7 * step]
    for r in range(n):
        b = best[r]
        for k in range(8):
            d = narrow(values[r + np.uint64(k) * s] - w)
            d = narrow(-d) if d < 0 else d
            d = farthest if d > farthest else d
            c = wide((c0, c1, c2, c3, c4, c5, c6, c7)[k] + wide(wide(d) * wide(d)))
            b = c if c < b else b
        best[r] = b


@kernel
def _interleave(source: np.ndarray, target: np.ndarray, rows: int) -> None:
    """target = the columns of `source` [rows, n] one after the other; rows: 2 or 4."""
    n = source.size // rows
    if rows == 2:
        a, b = source[:n], source[n:]
        for i in range(n):
            target[2 * i] = a[i]
            target[2 * i + 1] = b[i]
    else:
        a, b, c, d = source[:n], source[n : 2 * n], source[2 * n : 3 * n], source[3 * n :]
        for i in range(n):
            target[4 * i] = a[i]
            target[4 * i + 1] = b[i]
            target[4 * i + 2] = c[i]
            target[4 * i + 3] = d[i]


@kernel
def _advance(
    values: np.ndarray,
    sorted_values: np.ndarray,
    w: int,
    farthest: int,
    most: int,
    added_bits: int,
    next_bits: int,
    before: np.ndarray,
    after: np.ndarray,
    one: np.ndarray,
    two: np.ndarray,
) -> None:
    """after [2^(16 - next_bits)] = the cost of the best path to each overlap with the next weight, less the smallest.

    values         [65536], by state
    sorted_values  the same as [2^added_bits, 2^(16 - added_bits)]: by the bits that the weight adds, then by those before
    w              the weight
    added_bits     bits that it adds; `next_bits`: those that the next weight adds
    before         [2^(16 - added_bits)]: the costs so far
    one, two       scratch of the size of `after`
    """
    wide, choices = before.dtype.type, 1 << next_bits
    size, run = after.size, 1 << max(16 - added_bits - next_bits, 0)
    least_costs, other = one[:size], two[:size]
    least_costs[:] = wide(most + wide(farthest) * wide(farthest))
    if run >= 64:  # neighbours are overlaps before, which all have costs of their own
        for j in range(1 << added_bits):
            best, row = least_costs[j * run : (j + 1) * run], sorted_values[j * run * choices : (j + 1) * run * choices]
            if choices == 2:
                _least_of_2(best, row, before, w, farthest)
            elif choices == 4:
                _least_of_4(best, row, before, w, farthest)
            else:
                for k in range(0, choices * run, 8 * run):
                    _least_of_8(best, row[k : k + 8 * run], before[k : k + 8 * run], w, farthest)
    else:  # neighbours are the bits that the weight adds, and share what was before
        width = 1 << added_bits
        for i in range(run):
            best = least_costs[i * width : (i + 1) * width]
            for k in range(0, choices, 8):
                _least_of_same(best, values[k * size + i * width :], size, before[k * run + i :], run, w, farthest)
    least = least_costs[0]
    for i in range(size):
        least = least_costs[i] if least_costs[i] < least else least
    rounds = added_bits if run >= 64 else 0
    target = other if rounds else after
    for i in range(size):
        c = wide(least_costs[i] - least)
        target[i] = most if c > most else c
    source, spare = other, least_costs
    while rounds:
        rows = 4 if rounds >= 2 else 2
        rounds -= 2 if rows == 4 else 1
        target = spare if rounds else after
        _interleave(source, target, rows)
        source, spare = target, source


@kernel
def _search(
    weights: np.ndarray,
    first: int,
    count: int,
    start: int,
    bits: np.ndarray,
    values: np.ndarray,
    sorted_values: np.ndarray,
    farthest: int,
    most: int,
    costs: np.ndarray,
    states: np.ndarray,
) -> None:
    """states [256]: those of the best path for `count` weights of the circle from `first` on.

    start  the overlap before the first of them, with which the path ends too; -1 leaves both open
    """
    wide, one, two = costs.dtype.type, costs[257], costs[258]
    begin = costs[0, : 1 << (16 - bits[first & 1])]
    begin[:] = wide(0) if start < 0 else most
    if start >= 0:
        begin[start] = wide(0)
    for i in range(count):
        t = first + i
        added_bits, next_bits = bits[t & 1], bits[(t + 1) & 1]
        before, behind = costs[i, : 1 << (16 - added_bits)], costs[i + 1, : 1 << (16 - next_bits)]
        _advance(
            values, sorted_values[t & 1], weights[t & 255], farthest, most, added_bits, next_bits, before, behind, one, two
        )
    overlap = start
    if start < 0:
        overlap = 0
        for i in range(1 << (16 - bits[(first + count) & 1])):
            if costs[count, i] < costs[count, overlap]:
                overlap = i
    for i in range(count - 1, -1, -1):
        t = first + i
        added_bits, next_bits = bits[t & 1], bits[(t + 1) & 1]
        w, least, best_state = np.int64(weights[t & 255]), np.int64(1) << 60, 0
        for k in range(1 << next_bits):
            state = k << (16 - next_bits) | overlap
            d = min(abs(np.int64(values[state]) - w), np.int64(farthest))
            c = np.int64(costs[i, state >> added_bits]) + d * d
            if c < least:
                least, best_state = c, state
        states[t & 255] = best_state
        overlap = best_state >> added_bits


@kernel
def _store_path(states: np.ndarray, bits: np.ndarray, table: np.ndarray, words: np.ndarray, decoded: np.ndarray) -> None:
    """words uint32, decoded float32 [256] = the stream of a path, int64 [256], and its values.

    Values are those of the bits as stored: a path that does not end where it began would have others.
    """
    window = np.int64(0)
    for t in range(240, 256):
        window = (window << bits[t & 1] | states[t] & ((1 << bits[t & 1]) - 1)) & 0xFFFF
    buffer, held, at = np.uint64(0), 0, 0
    for t in range(256):
        k = bits[t & 1]
        new = states[t] & ((1 << k) - 1)
        window = (window << k | new) & 0xFFFF
        decoded[t] = table[window]
        buffer = buffer << np.uint64(k) | np.uint64(new)
        held += k
        if held >= 32:
            held -= 32
            words[at] = np.uint32(buffer >> np.uint64(held) & np.uint64(0xFFFFFFFF))
            at += 1


@kernel
def encode_tiles(
    weights: np.ndarray,
    bits: np.ndarray,
    scale: float,
    around: int,
    table: np.ndarray,
    values: np.ndarray,
    sorted_values: np.ndarray,
    farthest: int,
    most: int,
    costs: np.ndarray,
    words: np.ndarray,
    decoded: np.ndarray,
) -> None:
    """words, decoded = the streams of tiles, and their values.

    weights        float32 [n, 256], in the order of the stream
    bits           int64 [2]: that even and odd weights add, 1 to 8 each
    scale          units of 1
    around         weights before and after the start with which the overlap there is chosen; at most 128
    table          float32 [65536]: the value of each state
    values         int16 or int32 [65536]: `table` in units
    sorted_values  [2, 65536]: see `_advance`, for even and for odd weights
    farthest       the largest difference that counts, in units: one of `values`
    most           the largest cost that the next difference can be added to: one of `costs`
    costs          uint16 or uint32 [259, overlaps at most]: scratch
    words          uint32 [n, 8 · bits of a weight on average]: the highest bit of a word first
    decoded        float32 [n, 256]

    Cost: (256 + 2 · around) · 65,536 steps for each tile.
    """
    in_units, states = np.empty(256, values.dtype), np.empty(256, np.int64)
    largest = values[0]
    for state in range(values.size):
        largest = values[state] if values[state] > largest else largest
    limit = np.float32(largest)  # all values are too far from numbers beyond them
    for tile in range(weights.shape[0]):
        for t in range(256):
            x = np.rint(weights[tile, t] * np.float32(scale))
            in_units[t] = min(max(x, -limit), limit)
        _search(in_units, 256 - around, 2 * around, -1, bits, values, sorted_values, farthest, most, costs, states)
        overlap = states[0] >> bits[0]
        _search(in_units, 0, 256, overlap, bits, values, sorted_values, farthest, most, costs, states)
        _store_path(states, bits, table, words[tile], decoded[tile])
