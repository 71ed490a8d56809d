"""Names of tensors, scales in the order of a GPU's tiles, and the rotation of ConvRot.

Tiles are those of cuBLAS for scales of blocks (its documentation: "1D block scaling factors layout"): 512 bytes for 128 rows by
4 groups, tiles of a band of 128 rows one after the other. In a tile, the scale of row r and group g is byte

    16 · (r mod 32) + 4 · (r div 32) + g

Rows and groups are filled up to whole tiles, with zeros.

ConvRot (`_build_hadamard` in comfy-kitchen) multiplies runs of n = 4^k columns by the regular Hadamard matrix over √n: the
Kronecker power of the one of 4, in which a row is the sum of its elements less twice one of them. It is its own inverse.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsmith.abc.stored import Bytes, Rows

METHOD, TITLE = "comfyui", "ComfyUI"
WEIGHT, SETTINGS = ".weight", ".comfy_quant"
SCALE, OLD_SCALE, FACTOR = ".weight_scale", ".scale_weight", ".weight_scale_2"
INPUT_SCALES = (".input_scale", ".scale_input")
MARKER = "scaled_fp8"

TILE_ROWS, TILE_GROUPS = 128, 4
_COLUMN = 32
"""Rows of a tile that follow each other."""


def tiled_shape(rows: int, groups: int) -> tuple[int, int]:
    """The shape of the stored scales.

    >>> tiled_shape(200, 6)
    (256, 8)
    """
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-groups // TILE_GROUPS) * TILE_GROUPS


def to_tiles(scales: Bytes) -> Bytes:
    """uint8 [rows, groups] → the bytes of their tiles, flat.

    >>> tiles = to_tiles(np.arange(33, dtype=np.uint8)[:, None])
    >>> tiles.size, tiles[[16, 4, 1]].tolist()
    (512, [1, 32, 0])
    """
    high, wide = tiled_shape(*scales.shape)
    filled = np.zeros((high, wide), np.uint8)
    filled[: scales.shape[0], : scales.shape[1]] = scales
    tiles = filled.reshape(-1, TILE_ROWS // _COLUMN, _COLUMN, wide // TILE_GROUPS, TILE_GROUPS)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


def from_tiles(tiles: Bytes, groups: int) -> Bytes:
    """The bytes of bands of tiles → uint8 [rows, groups], with the rows that fill up the last tiles.

    >>> from_tiles(to_tiles(np.arange(33, dtype=np.uint8)[:, None]), 1)[:34, 0].tolist() == [*range(33), 0]
    True
    """
    _, wide = tiled_shape(TILE_ROWS, groups)
    bands = tiles.reshape(-1, wide // TILE_GROUPS, _COLUMN, TILE_ROWS // _COLUMN, TILE_GROUPS)
    return np.ascontiguousarray(bands.transpose(0, 3, 2, 1, 4)).reshape(-1, wide)[:, :groups]


def swapped(codes: Bytes) -> Bytes:
    """Bytes with their halves swapped.

    >>> swapped(np.uint8([0x12])).tobytes().hex()
    '21'
    """
    halves: Bytes = codes >> np.uint8(4) | codes << np.uint8(4)
    return halves


def is_rotation(size: int) -> bool:
    """Whether so many columns can be rotated: a power of 4.

    >>> [size for size in range(300) if is_rotation(size)]
    [4, 16, 64, 256]
    """
    return size >= 4 and size & (size - 1) == 0 and size.bit_length() % 2 == 1


def rotate(rows: Rows, size: int) -> None:
    """Multiply each run of `size` columns by the regular Hadamard matrix, in place: √size times the rotation.

    rows  float32 [n, cols]; sums of whole numbers are exact up to 2^24

    >>> rows = np.float32([[1, 0, 0, 0], [1, 2, 3, 4]])
    >>> rotate(rows, 4)
    >>> rows
    array([[ 1.,  1.,  1., -1.],
           [ 2.,  4.,  6.,  8.]], dtype=float32)
    """
    step = 1
    while step < size:
        parts: npt.NDArray[np.float32] = rows.reshape(-1, 4, step)
        total = parts[:, 0] + parts[:, 1] + parts[:, 2] + parts[:, 3]
        rotated = total[:, None] - 2 * parts[:, ::-1]
        parts[:] = rotated
        step *= 4
