"""Measures the merged delta of a tensor, and scales it before it is added to the base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.records import Encoded, Inputs
from weightsmith.abc.job import Bytes, Job, Matrix, Tile


class ScaledJob(Job):
    """Scales the delta of another job, whose result it keeps in float32 (float64 for outputs of 32 bits or more)."""

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job], norm: str, scale: float) -> None:
        from weightsmith._kernels.codecs import F32, F64

        super().__init__(matrix)
        self._code, self._width = (F64, 8) if matrix.wide else (F32, 4)
        self.inner = make(replace(matrix, out_code=self._code))
        self.sequential = self.inner.sequential
        self.resident_bytes = self.inner.resident_bytes
        self.portable = self.inner.portable
        self._norm = norm
        self.factor = scale
        weights = [m.get("weight") for m in matrix.models[1:]]
        self._weights = np.array([1.0 if w is None else float(w) for w in weights])

    def passes(self) -> int:
        return self.inner.passes() + (self._norm != "none")

    def statistics(self, number: int, tile: Tile) -> Any:
        if number < self.inner.passes():
            return self.inner.statistics(number, tile)
        return self._squares(tile)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        if number < self.inner.passes():
            self.inner.finish_pass(number, results)
            return
        totals = np.sqrt(np.cumsum(np.concatenate(results), axis=0)[-1])
        merged, summed, models = totals[0], totals[1], totals[2:]
        target = {"mean": models.mean(), "max": models.max(), "task_arithmetic": summed}[self._norm]
        with np.errstate(all="ignore"):  # NaN and infinity are reported by the tiles, or allowed
            if merged > 0:
                self.factor *= float(target / merged)

    def _merged(self, tile: Tile) -> Bytes:
        out = np.empty(tile.size * self._width, np.uint8)
        self.inner.apply(tile, out)
        return out

    def _squares(self, tile: Tile) -> npt.NDArray[np.float64]:
        """float64 [grains, 2 + models]: squared norms of the merged delta, the weighted sum, and each model's delta."""
        from weightsmith._kernels.delta import delta_squares

        m, scratch = self.matrix, tile.scratch
        merged = self._merged(tile)
        out = np.empty((tile.grains(m.grain), 2 + len(self._weights)))
        rows, sums = scratch.rows(2, m.codes, self._code), scratch.sums(out.shape[1] + 1)
        inputs, found = Inputs(tile.raw, m.codes), Encoded(merged, self._code)
        delta_squares(inputs, tile.size, m.grain, self._weights, found, out, rows, sums)
        return out

    def apply(self, tile: Tile, out: Bytes) -> None:
        from weightsmith._kernels.delta import rescale_delta

        m, scratch = self.matrix, tile.scratch
        merged = self._merged(tile)
        rows, sums = scratch.rows(2, m.codes, self._code), scratch.sums(1)
        inputs, found = Inputs(tile.raw, m.codes), Encoded(merged, self._code)
        rescale_delta(inputs, found, tile.size, self.factor, Encoded(out, m.out_code), rows, sums)
