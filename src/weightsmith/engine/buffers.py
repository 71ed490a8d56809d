"""One thread's memory."""

from __future__ import annotations

import numpy as np

from weightsmith.jobs.job import Bytes, Scratch
from weightsmith.store.weight_file import PAGE_BYTES


class Buffers:
    """One thread's memory: raw tiles of the inputs, the encoded tile of the output, kernel scratch."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._raw = np.empty(0, np.uint8)
        self._out = np.empty(0, np.uint8)

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
