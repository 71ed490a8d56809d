"""Steps after a merge: jobs that wrap another, and change its merged delta before it is added to the base.

`SpectrumJob` changes the singular values of a linear layer's delta, `ColumnsJob` scales its columns, and `ScaledJob` scales
the delta of any tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.codecs import F32, F64, Encoded, EncodedInputs
from weightsmith._kernels.combine import copy_rows, delta_squares, rescale_delta
from weightsmith._methods.jobs.decompose import transform
from weightsmith._methods.jobs.matrix import MatrixJob, write_with
from weightsmith.abc.job import Bytes, Job, Matrix, Tile


class FollowingJob(Job):
    """Takes the result of another job in float32 (float64 for outputs of 32 bits or more).

    inner     the other job
    measures  whether there is a pass over its result
    """

    measures = False

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job]) -> None:
        """make: makes the other job, for the matrix with that output dtype."""
        super().__init__(matrix)
        self.code, self._width = (F64, 8) if matrix.wide else (F32, 4)
        self.inner = make(replace(matrix, out_code=self.code))
        self.sequential = self.inner.sequential
        self.resident_bytes = self.inner.resident_bytes
        self.portable = self.inner.portable

    def passes(self) -> int:
        return self.inner.passes() + self.measures

    def statistics(self, number: int, tile: Tile) -> Any:
        return self.inner.statistics(number, tile) if number < self.inner.passes() else self.measure(tile)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        if number < self.inner.passes():
            self.inner.finish_pass(number, results)
        else:
            self.finish_measuring(results)

    def merged(self, tile: Tile) -> Bytes:
        """The tile as the other job merges it."""
        out = np.empty(tile.size * self._width, np.uint8)
        self.inner.apply(tile, out)
        return out

    def appended(self, raw: Bytes, merged: Bytes) -> Bytes:
        """Inputs [models, bytes] and the result of the other job, as one more of them."""
        width = -(-max(raw.shape[1], merged.size) // 64) * 64  # rows are views of wider elements
        rows = np.zeros((len(raw) + 1, width), np.uint8)
        rows[:-1, : raw.shape[1]] = raw
        rows[-1, : merged.size] = merged
        return rows

    def measure(self, tile: Tile) -> Any:
        """Statistics of one tile in the last pass."""

    def finish_measuring(self, results: list[Any]) -> None:
        """Process the statistics of all tiles, in tile order."""


class ScaledJob(FollowingJob):
    """Scales the delta of another job: by `scale`, after it has got the `norm` that is asked for, if any."""

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job], norm: str, scale: float) -> None:
        super().__init__(matrix, make)
        self.measures = norm != "none"
        self._norm = norm
        self.factor = scale
        weights = [m.get("weight") for m in matrix.models[1:]]
        self._weights = np.array([1.0 if w is None else float(w) for w in weights])

    def measure(self, tile: Tile) -> npt.NDArray[np.float64]:
        """float64 [grains, 2 + models]: squared norms of the merged delta, the weighted sum, and each model's delta."""
        m, scratch = self.matrix, tile.scratch
        merged = self.merged(tile)
        out = np.empty((tile.grains(m.grain), 2 + len(self._weights)))
        rows, sums = scratch.rows(2, m.codes, self.code), scratch.sums(out.shape[1] + 1)
        inputs, result = EncodedInputs(tile.raw, m.codes), Encoded(merged, self.code)
        delta_squares(inputs, tile.size, m.grain, self._weights, result, out, rows, sums)
        return out

    def finish_measuring(self, results: list[Any]) -> None:
        totals = np.sqrt(np.cumsum(np.concatenate(results), axis=0)[-1])
        merged, summed, models = totals[0], totals[1], totals[2:]
        target = {"mean": models.mean(), "max": models.max(), "task_arithmetic": summed}[self._norm]
        with np.errstate(all="ignore"):  # NaN and infinity are reported by the tiles, or allowed
            if merged > 0:
                self.factor *= float(target / merged)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch = self.matrix, tile.scratch
        merged = self.merged(tile)
        rows, sums = scratch.rows(2, m.codes, self.code), scratch.sums(1)
        inputs, result = EncodedInputs(tile.raw, m.codes), Encoded(merged, self.code)
        rescale_delta(inputs, result, tile.size, self.factor, Encoded(out, m.out_code), rows, sums)


class SpectrumJob(FollowingJob):
    """Changes the singular values of another job's delta, as the matrix methods do: with torch, in float64, in memory."""

    measures = True

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job], how: str, strength: float | None) -> None:
        super().__init__(matrix, make)
        models = len(matrix.codes) - 1
        # The merged delta is passed to the matrix job as one more model.
        self._gathered = MatrixJob(
            replace(matrix, codes=np.append(matrix.codes, self.code), models=(*matrix.models, {})),
            lambda deltas: transform(deltas[models], [deltas[i] for i in range(models)], how, strength),
            np.array([1.0]),
            np.ones(models + 1),
            1.0,
        )
        self.resident_bytes += self._gathered.resident_bytes
        self.portable = False

    def measure(self, tile: Tile) -> None:
        self._gathered.statistics(0, replace(tile, raw=self.appended(tile.raw, self.merged(tile))))

    def finish_measuring(self, results: list[Any]) -> None:
        self._gathered.finish_pass(0, results)

    def apply(self, tile: Tile, out: Bytes) -> None:
        write_with(self.matrix, tile, out, np.ones(1), self._gathered.update(tile))


class ColumnsJob(FollowingJob):
    """Scales each column of another job's delta. factors: float64 [cols]."""

    def __init__(self, matrix: Matrix, make: Callable[[Matrix], Job], factors: npt.NDArray[np.float64]) -> None:
        super().__init__(matrix, make)
        self._factors = factors

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        raw, codes = self.appended(tile.raw[:1], self.merged(tile)), np.array([m.codes[0], self.code])
        rows = tile.scratch.rows(1, m.codes, m.out_code)
        delta = np.empty((1, tile.size), rows.dtype)
        copy_rows(raw, codes, tile.size, 0, True, delta, rows)
        update = delta[0] * self._factors[(tile.start + np.arange(tile.size)) % m.cols]
        write_with(m, tile, out, np.ones(1), update)
