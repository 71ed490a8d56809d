"""The scales of a matrix, as codes and as the loader computes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)


def pack_codes(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """Eight 4-bit codes a word, the first in the lowest bits: [G, n] → int32 [G, n / 8].

    >>> [hex(word) for word in pack_codes(np.arange(16, dtype=np.uint8)[None] % 8)[0]]
    ['0x76543210', '0x76543210']
    """
    words = codes.reshape(len(codes), -1, 8).astype(np.uint32) << _SHIFTS
    packed: npt.NDArray[np.uint32] = np.bitwise_or.reduce(words, axis=2)
    return packed.view(np.int32)


def unpack_codes(words: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
    """The codes: int32 [G, n / 8] → [G, n].

    >>> unpack_codes(pack_codes(np.uint8([[1, 2, 3, 4, 5, 6, 7, 8]]))).tolist()
    [[1, 2, 3, 4, 5, 6, 7, 8]]
    """
    return (words.view(np.uint32)[:, :, None] >> _SHIFTS & np.uint32(15)).reshape(len(words), -1)


def scale_values(tops: Halves, codes: npt.NDArray[np.integer]) -> Floats:
    """float32 [len(tops), …]: the scales of 4-bit codes for each largest scale, in the loader's float16 arithmetic."""
    steps = (tops.astype(np.float32) / 256).astype(np.float16).astype(np.float32)
    return (steps[:, None] * (codes.astype(np.float32) + 1) ** 2).astype(np.float16).astype(np.float32)
