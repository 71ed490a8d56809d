"""Scales the columns of each linear layer's merged delta, before it is added to the base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.matrix import combine_with, copy_rows
from weightsmith._kernels.records import Encoded, Inputs
from weightsmith.abc.job import Bytes, Job, Matrix, Tile


class ColumnsJob(Job):
    """Another job's delta times a factor for each column, float64 [cols]. Keeps its result in float32; wide rows in float64."""

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job], factors: npt.NDArray[np.float64]) -> None:
        from weightsmith._kernels.codecs import F32, F64

        super().__init__(matrix)
        self._code, self._width = (F64, 8) if matrix.wide else (F32, 4)
        self.inner = make(replace(matrix, out_code=self._code))
        self.sequential = self.inner.sequential
        self.resident_bytes = self.inner.resident_bytes
        self.portable = self.inner.portable
        self._factors = factors

    def passes(self) -> int:
        return self.inner.passes()

    def statistics(self, number: int, tile: Tile) -> Any:
        return self.inner.statistics(number, tile)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        self.inner.finish_pass(number, results)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, width = self.matrix, max(tile.raw.shape[1], tile.size * self._width)
        raw = np.zeros((2, -(-width // 64) * 64), np.uint8)  # rows are views of wider elements
        raw[0, : tile.raw.shape[1]] = tile.raw[0]
        self.inner.apply(tile, raw[1, : tile.size * self._width])
        codes = np.array([m.codes[0], self._code])
        rows, sums = tile.scratch.rows(1, m.codes, m.out_code), tile.scratch.sums(1)
        delta = np.empty((1, tile.size), rows.dtype)
        copy_rows(raw, codes, tile.size, 0, True, delta, rows)
        update = delta[0] * self._factors[(tile.start + np.arange(tile.size)) % m.cols]
        combine_with(Inputs(raw[:1], codes[:1]), np.ones(1), update, tile.size, Encoded(out, m.out_code), rows, sums)
