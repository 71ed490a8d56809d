"""One thread's memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsmith._outputs.local.weight_file import PAGE_BYTES
from weightsmith.abc.job import Bytes, Scratch


class Buffers:
    """One thread's memory: raw tiles of the inputs, the encoded tile of the output, kernel scratch."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._raw = np.empty(0, np.uint8)
        self._out = np.empty(0, np.uint8)
        self._numbers = np.empty(0, np.uint8)
        self._rows = np.empty(0, np.float32)

    def raw(self, inputs: int, nbytes: int) -> Bytes:
        """uint8 [inputs, >= nbytes], rows aligned to 64 bytes."""
        width = -(-nbytes // 64) * 64
        if self._raw.size < inputs * width:
            self._raw = np.empty(inputs * width, np.uint8)
        return self._raw[: inputs * width].reshape(inputs, width)

    def out(self, nbytes: int, offset: int) -> Bytes:
        """uint8 [nbytes], at an address that equals `offset` (in its file) modulo a page, as direct writes want it."""
        if self._out.size < nbytes + PAGE_BYTES:
            self._out = np.empty(nbytes + PAGE_BYTES, np.uint8)
        first = (offset - self._out.ctypes.data) % PAGE_BYTES
        return self._out[first : first + nbytes]

    def numbers(self, nbytes: int) -> Bytes:
        """uint8 [nbytes]: a tile before it is encoded."""
        if self._numbers.size < nbytes:
            self._numbers = np.empty(nbytes, np.uint8)
        return self._numbers[:nbytes]

    def rows(self, count: int) -> npt.NDArray[np.float32]:
        """float32 [count]: rows of such a tile, to be encoded."""
        if self._rows.size < count:
            self._rows = np.empty(count, np.float32)
        return self._rows[:count]
