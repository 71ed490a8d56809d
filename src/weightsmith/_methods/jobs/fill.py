"""Fills a tensor with one number."""

from __future__ import annotations

import numpy as np

from weightsmith._base.tensors import BY_CODE
from weightsmith.abc.job import Bytes, Job, Matrix, Tile


class FillJob(Job):
    """Fills with the shared parameter `value`, rounded to the output's dtype."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__(matrix)
        value = np.float32(matrix.shared["value"])
        self._element = np.array([value]).astype(BY_CODE[matrix.out_code].numpy).view(np.uint8)

    def apply(self, tile: Tile, out: Bytes) -> None:
        out.reshape(-1, len(self._element))[:] = self._element
