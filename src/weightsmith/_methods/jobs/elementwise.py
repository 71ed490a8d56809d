"""Elementwise jobs: one kernel call per tile, after a counting pass for RAM+."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.elementwise import count_active, merge_active
from weightsmith._kernels.records import Encoded, Inputs
from weightsmith.abc.job import Bytes, Job, Matrix, Tile

Counts = npt.NDArray[np.int64]
"""[models, 2]: the number of positions where only this model is active, and where others are too."""


class ElementwiseJob(Job):
    """Calls `kernel(inputs, n, *arguments, out, rows, sums)` per tile, with `sums` rows of float64 scratch."""

    def __init__(self, matrix: Matrix, kernel: Callable[..., None], *arguments: Any, sums: int = 2) -> None:
        super().__init__(matrix)
        self._kernel = kernel
        self._arguments = arguments
        self._sums = sums

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch = self.matrix, tile.scratch
        rows, sums = scratch.rows(len(m.codes), m.codes, m.out_code), scratch.sums(self._sums)
        inputs, encoded = Inputs(tile.raw, m.codes), Encoded(out, m.out_code)
        self._kernel(inputs, tile.size, *self._arguments, encoded, rows, sums)


def count_tile(matrix: Matrix, tile: Tile, epsilon: float) -> Counts:
    """Counts where each model is active (|delta| > epsilon) in one tile."""
    counts = np.zeros((len(matrix.codes) - 1, 2), np.int64)
    rows = tile.scratch.rows(len(matrix.codes), matrix.codes, matrix.out_code)
    count_active(tile.raw, matrix.codes, tile.size, epsilon, counts, rows, tile.scratch.sums(1))
    return counts


class ActiveJob(Job):
    """RAM: factor · the mean delta of the active models (|delta| > epsilon) at each position.

    alone  factors (float64 [models]) on deltas where only one model is active, or a function from the matrix's counts to
           such factors; None: all 1, as in RAM
    """

    def __init__(
        self,
        matrix: Matrix,
        epsilon: float,
        alone: npt.NDArray[np.float64] | Callable[[Counts], npt.NDArray[np.float64]] | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__(matrix)
        self.epsilon = epsilon
        self.factor = factor
        self._alone = alone if callable(alone) else None
        self.factors = np.ones(len(matrix.codes) - 1) if alone is None or callable(alone) else alone

    def passes(self) -> int:
        return 0 if self._alone is None else 1

    def statistics(self, number: int, tile: Tile) -> Counts:
        return count_tile(self.matrix, tile, self.epsilon)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        assert self._alone is not None
        self.factors = self._alone(np.sum(results, axis=0))

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch = self.matrix, tile.scratch
        rows, sums = scratch.rows(len(m.codes), m.codes, m.out_code), scratch.sums(3)
        inputs, encoded = Inputs(tile.raw, m.codes), Encoded(out, m.out_code)
        merge_active(inputs, tile.size, self.epsilon, self.factors, self.factor, encoded, rows, sums)
