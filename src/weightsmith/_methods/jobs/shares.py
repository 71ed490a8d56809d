"""Means of the deltas, in which each element of each model has a share of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.matrix import copy_rows
from weightsmith._methods.jobs.matrix import write_with
from weightsmith.abc.job import Bytes, Job, Matrix, Tile


class SharesJob(Job):
    """base + factor · Σ wᵢ sᵢ δᵢ / Σ sᵢ, element by element; the mean of wᵢδᵢ where all shares are 0.

    shares  float32 [rows, cols] of each delta, not negative; may be mapped from a file
    weight  wᵢ, one for each delta
    floor   the least share, of the mean of all shares

    Computed in float64.
    """

    def __init__(
        self, matrix: Matrix, shares: Sequence[npt.NDArray[Any]], weight: Sequence[float], floor: float, factor: float
    ) -> None:
        super().__init__(matrix)
        self._shares = [share.reshape(-1) for share in shares]
        self._weight = np.asarray(weight, np.float64)
        self._floor, self._factor = floor, factor
        self._least = 0.0
        self._base = np.array([1.0] + [0.0] * len(shares))

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> list[float]:
        """The sums of the shares of each grain."""
        m, end = self.matrix, tile.start + tile.size
        starts = range(tile.start, end, m.grain)
        return [float(share[a : min(a + m.grain, end)].sum(dtype=np.float64)) for a in starts for share in self._shares]

    def finish_pass(self, number: int, results: list[Any]) -> None:
        total = np.cumsum(np.concatenate(results))[-1]  # adds sequentially
        self._least = self._floor * float(total) / (len(self._shares) * self.matrix.size)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        rows = tile.scratch.rows(1, m.codes, m.out_code)
        deltas = np.empty((len(self._shares), tile.size), rows.dtype)
        copy_rows(tile.raw, m.codes, tile.size, 0, True, deltas, rows)
        update, mean, total = np.zeros(tile.size), np.zeros(tile.size), np.zeros(tile.size)
        with np.errstate(all="ignore"):  # NaN and infinity are reported by the tiles, or allowed
            for share, weight, delta in zip(self._shares, self._weight, deltas, strict=True):
                least_share = np.maximum(share[tile.start : tile.start + tile.size], self._least, dtype=np.float64)
                total += least_share
                update += (weight * least_share) * delta
                mean += weight * delta
            update = self._factor * np.where(total > 0, update / total, mean / len(deltas))
        write_with(m, tile, out, self._base, update)
