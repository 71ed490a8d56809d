"""Flattens or calibrates the singular values of each linear layer's merged delta.

Applies after any method with a base, before norm matching (`scaled.py`). Tensors that are not weights of linear layers are
not changed. The job of the matrix methods computes it with torch in float64, one whole matrix at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from weightsmith._kernels.records import Encoded, Inputs
from weightsmith._methods.jobs.spectra import transform
from weightsmith.abc.job import Bytes, Job, Matrix, Tile


class SpectrumJob(Job):
    """Changes the spectrum of another job's delta, in one more pass that collects the merged delta in memory."""

    portable = False

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job], how: str, strength: float | None) -> None:
        from weightsmith._kernels.codecs import F32, F64
        from weightsmith._methods.jobs.matrix import MatrixJob

        super().__init__(matrix)
        self._code, self._width = (F64, 8) if matrix.wide else (F32, 4)
        self.inner = make(replace(matrix, out_code=self._code))
        self.sequential = self.inner.sequential
        models = len(matrix.codes) - 1
        # The merged delta is passed to the matrix job as one more model.
        self._gathered = MatrixJob(
            replace(matrix, codes=np.append(matrix.codes, self._code), models=(*matrix.models, {})),
            lambda deltas: transform(deltas[models], [deltas[i] for i in range(models)], how, strength),
            np.array([1.0]),
            np.ones(models + 1),
            1.0,
        )
        self.resident_bytes = self.inner.resident_bytes + self._gathered.resident_bytes

    def passes(self) -> int:
        return self.inner.passes() + 1

    def statistics(self, number: int, tile: Tile) -> Any:
        if number < self.inner.passes():
            return self.inner.statistics(number, tile)
        merged = np.empty(tile.size * self._width, np.uint8)
        self.inner.apply(tile, merged)
        width = -(-max(tile.raw.shape[1], merged.size) // 64) * 64  # rows are views of wider elements
        raw = np.zeros((len(tile.raw) + 1, width), np.uint8)
        raw[:-1, : tile.raw.shape[1]] = tile.raw
        raw[-1, : merged.size] = merged
        return self._gathered.statistics(0, replace(tile, raw=raw))

    def finish_pass(self, number: int, results: list[Any]) -> None:
        if number < self.inner.passes():
            self.inner.finish_pass(number, results)
        else:
            self._gathered.finish_pass(0, results)

    def apply(self, tile: Tile, out: Bytes) -> None:
        from weightsmith._kernels.matrix import combine_with

        m = self.matrix
        update = self._gathered.update(tile)
        rows, sums = tile.scratch.rows(1, m.codes, m.out_code), tile.scratch.sums(1)
        base, encoded = Inputs(tile.raw[:1], m.codes[:1]), Encoded(out, m.out_code)
        combine_with(base, np.ones(1), update, tile.size, encoded, rows, sums)
