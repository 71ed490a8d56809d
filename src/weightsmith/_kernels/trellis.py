"""EXL3's weights: codes of a trellis to float32, and the rotation of blocks of 128 x 128.

A tile of 16 x 16 weights is a circular stream of 256 · K bits. The 16 bits up to bit (t + 1) · K are the index of weight t in a
table of 65,536, so neighbours share bits. The weights of a tile come in the order in which a GPU's tensor cores hold them.
A block of 8 x 8 tiles is then rotated from both sides by a Hadamard matrix.
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
def _decode_tiles(words: np.ndarray, k: int, table: np.ndarray, block: np.ndarray) -> None:
    """block [128 inputs, 128 outputs] = the values of 8 x 8 tiles; arguments as for `dequantise_trellis`."""
    count = 8 * k
    for tile in range(64):
        stream = words[tile * count : (tile + 1) * count]
        origin = (tile >> 3) * 16 * 128 + (tile & 7) * 16
        window, left, at = np.uint64(stream[count - 1]), 0, 0  # the stream is circular: before its first bits come its last
        for t in range(256):
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
    k: int,
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

    words          uint32: rows of 8 tiles, of 16 inputs each; a tile has 8 · k words, the highest bit of a word first
    k              bits of a weight, 1 to 8
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
    for b in range(input_scales.size // 128):
        _decode_tiles(words[b * 512 * k : (b + 1) * 512 * k], k, table, rotated)
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
