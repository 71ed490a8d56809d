"""Jobs that look at one position of all models at a time: a kernel call a tile, and for RAM+ a count before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.jobs.job import Bytes, Job, Matrix, Tile
from weightsmith.jobs.survey import Survey
from weightsmith.kernels.elementwise import count_active, merge_active

Counts = npt.NDArray[np.int64]
"""[models, 2]: positions where a model is active alone, and where others are too."""


class ElementwiseJob(Job):
    """Calls `kernel(raw, codes, n, *arguments, out, out_code, rows, sums)` on each tile; `sums` rows of float64 scratch."""

    def __init__(self, matrix: Matrix, kernel: Callable[..., None], *arguments: Any, sums: int = 2) -> None:
        super().__init__(matrix)
        self._kernel = kernel
        self._arguments = arguments
        self._sums = sums

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch = self.matrix, tile.scratch
        rows, sums = scratch.rows(len(m.codes), m.codes, m.out_code), scratch.sums(self._sums)
        self._kernel(tile.raw, m.codes, tile.size, *self._arguments, out, m.out_code, rows, sums)


def count_tile(matrix: Matrix, tile: Tile, epsilon: float) -> Counts:
    """Where each model of one tile is active, |delta| > epsilon."""
    counts = np.zeros((len(matrix.codes) - 1, 2), np.int64)
    rows = tile.scratch.rows(len(matrix.codes), matrix.codes, matrix.out_code)
    count_active(tile.raw, matrix.codes, tile.size, epsilon, counts, rows, tile.scratch.sums(1))
    return counts


class ActiveJob(Job):
    """RAM: the delta of the one model that is active, else the mean of the active ones.

    alone  from the counts of the matrix to factors (float64 [models]) on deltas that are active alone; None: RAM, all 1
    """

    def __init__(self, matrix: Matrix, alone: Callable[[Counts], npt.NDArray[np.float64]] | None = None) -> None:
        super().__init__(matrix)
        self.epsilon = float(matrix.shared["epsilon"])  # type: ignore[arg-type]
        self.factors = np.ones(len(matrix.codes) - 1)
        self._alone = alone

    def passes(self) -> int:
        return 0 if self._alone is None else 1

    def statistics(self, number: int, tile: Tile) -> Counts:
        return count_tile(self.matrix, tile, self.epsilon)

    def fold(self, number: int, results: list[Any]) -> None:
        assert self._alone is not None
        self.factors = self._alone(np.sum(results, axis=0))

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch = self.matrix, tile.scratch
        factor = float(m.shared.get("lambda", 1.0))  # type: ignore[arg-type]
        rows, sums = scratch.rows(len(m.codes), m.codes, m.out_code), scratch.sums(3)
        merge_active(tile.raw, m.codes, tile.size, self.epsilon, self.factors, factor, out, m.out_code, rows, sums)


class ActiveSurvey(Survey):
    """Where each model (by its number in the plan) is active, over all tensors of the merge, each with its own epsilon."""

    def __init__(self) -> None:
        self.counts: dict[int, Counts] = {}

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> tuple[tuple[int, ...], Counts]:
        return matrix.inputs[1:], count_tile(matrix, tile, float(matrix.shared["epsilon"]))  # type: ignore[arg-type]

    def fold(self, number: int, results: Iterable[tuple[tuple[int, ...], Counts]]) -> None:
        for models, counts in results:
            for model, count in zip(models, counts, strict=True):
                self.counts[model] = self.counts.get(model, np.zeros(2, np.int64)) + count

    def of(self, models: Sequence[int]) -> Counts:
        """The counts of these models, [models, 2]; zeros before the pass."""
        return np.stack([self.counts.get(model, np.zeros(2, np.int64)) for model in models])
