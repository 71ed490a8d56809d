"""One thread's memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsmith._outputs.weight_files import PAGE_BYTES
from weightsmith.abc.job import Bytes, Scratch


class Buffers:
    """One thread's memory: raw tiles of the inputs, the encoded tile of the output, kernel scratch."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._held: dict[str, Bytes] = {}

    def _at_least(self, use: str, nbytes: int) -> Bytes:
        """Memory for one use, as long as it ever was."""
        if use not in self._held or self._held[use].size < nbytes:
            self._held[use] = np.empty(nbytes, np.uint8)
        return self._held[use]

    def raw(self, inputs: int, nbytes: int) -> Bytes:
        """uint8 [inputs, >= nbytes], rows aligned to 64 bytes."""
        width = -(-nbytes // 64) * 64
        return self._at_least("raw", inputs * width)[: inputs * width].reshape(inputs, width)

    def out(self, nbytes: int, offset: int) -> Bytes:
        """uint8 [nbytes], at an address that equals `offset` (in its file) modulo a page, as direct writes want it."""
        held = self._at_least("out", nbytes + PAGE_BYTES)
        first = (offset - held.ctypes.data) % PAGE_BYTES
        return held[first : first + nbytes]

    def numbers(self, nbytes: int) -> Bytes:
        """uint8 [nbytes]: a tile before it is encoded."""
        return self._at_least("numbers", nbytes)[:nbytes]

    def rows(self, count: int) -> npt.NDArray[np.float32]:
        """float32 [count]: rows of such a tile, to be encoded."""
        return self._at_least("rows", 4 * count)[: 4 * count].view(np.float32)
