"""EXL3's weights: codes of a trellis to float32, and the rotation of blocks of 128 x 128.

A tile of 16 x 16 weights is a circular stream of bits. Each weight adds K of them, or even ones add K and odd ones K + 1.
The 16 bits up to those of a weight are its index in a table of 65,536, so neighbours share bits. The weights of a tile come in
the order in which a GPU's tensor cores hold them. A block of 8 x 8 tiles is then rotated from both sides by a Hadamard matrix.
`trellis_search.py` finds the streams.
"""

from __future__ import annotations

import numpy as np

from weightsmith._kernels.jit import kernel


def _places() -> np.ndarray:
    """int64 [256]: 128 · input + output, inside a block, of each weight of a tile."""
    t = np.arange(256)
    lane, j = t // 8, t % 8
    row = lane % 4 * 2 + np.array([0, 1, 8, 9])[j % 4]
    col = lane // 4 + 8 * (j // 4)
    places: np.ndarray = row * 128 + col
    return places


PLACES = _places()


@kernel
def _decode_tiles(words: np.ndarray, bits: np.ndarray, table: np.ndarray, block: np.ndarray) -> None:
    """block [128 inputs, 128 outputs] = the values of 8 x 8 tiles; arguments as for `dequantise_trellis`."""
    count = 4 * (bits[0] + bits[1])
    for tile in range(64):
        stream = words[tile * count : (tile + 1) * count]
        origin = (tile >> 3) * 16 * 128 + (tile & 7) * 16
        window, left, at = np.uint64(stream[count - 1]), 0, 0  # the stream is circular: before its first bits come its last
        for t in range(256):
            k = bits[t & 1]
            if left < k:
                window = window << np.uint64(32) | np.uint64(stream[at])
                at += 1
                left += 32
            left -= k
            block[origin + PLACES[t]] = table[np.int64(window >> np.uint64(left) & np.uint64(0xFFFF))]


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
    top: int,
    left: int,
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
    top, left      the first of these outputs and inputs
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
        origin = left + b * 128
        for o in range(min(128, outputs - top)):
            row = (top + o) * inputs + origin - first
            scale = output_scales[o]
            for i in range(max(0, -row), min(128, inputs - origin, out.size - row)):
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
    for left in range(0, input_factors.size, 128):
        block[:] = np.float32(0)
        for o in range(high):
            for i in range(min(128, wide - left)):
                block[o * 128 + i] = rows[o, left + i] * input_factors[left + i] * output_factors[o]
        _rotate(block)
        for i in range(128):
            for o in range(128):
                rotated[i * 128 + o] = block[o * 128 + i]
        _rotate(rotated)
        for i in range(128):
            for o in range(128):
                out[left + i, o] = rotated[i * 128 + o] * np.float32(1 / 128)
