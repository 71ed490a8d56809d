"""Elementwise jobs: one kernel call per tile, after passes that count where models are active (RAM+), or choose positions by a
score over the whole matrix (SCE by variance among models, Arcee Fusion by importance).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.codecs import Encoded, EncodedInputs
from weightsmith._kernels.divergence import row_divergence
from weightsmith._kernels.elementwise import count_active, count_varying, energies, merge_active, merge_elected, merge_fused
from weightsmith._kernels.select import IMPORTANCE, VARIANCE, Scores, select_scores
from weightsmith._methods.jobs.selection import Selection
from weightsmith.abc.job import Bytes, Job, Matrix, Tile

Counts = npt.NDArray[np.int64]
"""[models, 2]: the number of positions where only this model is active, and where others are too."""

_ALL = np.zeros(0, np.uint8)
_NO_FACTORS = np.zeros(0)
_KEY = (VARIANCE, 0)


class ElementwiseJob(Job):
    """Calls `kernel(inputs, n, *arguments, out, rows, sums)` per tile, with `sums` rows of float64 scratch."""

    def __init__(self, matrix: Matrix, kernel: Callable[..., None], *arguments: Any, sums: int = 2) -> None:
        super().__init__(matrix)
        self._kernel = kernel
        self._arguments = arguments
        self._sums = sums

    def arguments(self, tile: Tile) -> tuple[Any, ...]:
        """The kernel's arguments for a tile."""
        return self._arguments

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch, arguments = self.matrix, tile.scratch, self.arguments(tile)
        rows, sums = scratch.rows(len(m.codes), m.codes, m.out_code), scratch.sums(self._sums)
        self._kernel(EncodedInputs(tile.raw, m.codes), tile.size, *arguments, Encoded(out, m.out_code), rows, sums)


def count_tile(matrix: Matrix, tile: Tile, epsilon: float) -> Counts:
    """Counts where each model is active (|delta| > epsilon) in one tile."""
    counts = np.zeros((len(matrix.codes) - 1, 2), np.int64)
    rows = tile.scratch.rows(len(matrix.codes), matrix.codes, matrix.out_code)
    count_active(tile.raw, matrix.codes, tile.size, epsilon, counts, rows, tile.scratch.sums(1))
    return counts


class ActiveJob(ElementwiseJob):
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
        super().__init__(matrix, merge_active, sums=3)
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

    def arguments(self, tile: Tile) -> tuple[Any, ...]:
        return self.epsilon, self.factors, self.factor


class SceJob(ElementwiseJob):
    """Select positions by variance, calculate each model's share from its energy there, erase minority signs.

    Passes: count positions that vary (only if a part is selected), find their threshold (one pass, or three if the estimate
    missed), energies, apply.
    """

    def __init__(self, matrix: Matrix, select_topk: float, *, mask_update: bool) -> None:
        """mask_update: positions not selected keep the base's value; else the selection affects only the shares."""
        super().__init__(matrix, merge_elected, sums=3)
        self._topk = select_topk
        self._mask_update = mask_update
        self._selection = Selection(matrix, {_KEY: 1} if select_topk < 1 else {})  # the rank is known after the first pass
        self._nothing = False  # no position is selected
        self._selected_bits: dict[int, npt.NDArray[np.uint8]] = {}  # by tile, from the pass for energies
        self.resident_bytes = -(-matrix.size // 8) if select_topk < 1 else 0
        self.shares = np.zeros(len(matrix.codes) - 1)

    def _plan(self) -> list[str]:
        counting = [] if self._topk >= 1 else ["varying"]
        return [*counting, *self._selection.plan(), "energies"]

    def passes(self) -> int:
        return len(self._plan())

    def statistics(self, number: int, tile: Tile) -> Any:
        m, scratch = self.matrix, tile.scratch
        kind = self._plan()[number]
        if kind == "varying":
            return int(count_varying(tile.raw, m.codes, tile.size, scratch.rows(2, m.codes, m.out_code)))
        if kind == "energies":
            out = np.zeros((tile.grains(m.grain), len(self.shares)))
            rows, sums = scratch.rows(len(m.codes), m.codes, m.out_code), scratch.sums(len(self.shares))
            energies(tile.raw, m.codes, tile.size, m.grain, self._selected(tile), out, rows, sums)
            return out
        return self._selection.statistics(kind, tile)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        kind = self._plan()[number]
        if kind == "varying":
            rank = int(self._topk * sum(results))
            self._nothing = rank == 0
            self._selection = Selection(self.matrix, {_KEY: rank} if rank else {})
        elif kind == "energies":
            total = np.cumsum(np.concatenate(results), axis=0)[-1]
            whole = total.sum()
            with np.errstate(invalid="ignore"):  # infinities, if allowed
                self.shares = total / whole if whole > 0 else np.full(len(total), 1 / len(total))
        else:
            self._selection.finish_pass(kind)

    def _selected(self, tile: Tile) -> npt.NDArray[np.uint8]:
        """uint8 [tile.size]: 1 for selected positions; empty if all are selected."""
        if self._topk >= 1:
            return _ALL
        m, scratch = self.matrix, tile.scratch
        if tile.start in self._selected_bits:
            return np.unpackbits(self._selected_bits[tile.start], count=tile.size)
        if self._nothing:
            return np.zeros(tile.size, np.uint8)
        selected = np.empty(tile.size, np.uint8)
        limit, cut = self._selection.threshold(_KEY), self._selection.cut(_KEY, tile) - tile.start
        rows = scratch.rows(2, m.codes, m.out_code)
        scores = Scores(tile.raw, m.codes, VARIANCE, _NO_FACTORS, m.cols, rows, scratch.bits)
        select_scores(scores, tile.size, limit, cut, selected)
        if self._mask_update:
            self._selected_bits[tile.start] = np.packbits(selected)
        return selected

    def arguments(self, tile: Tile) -> tuple[Any, ...]:
        return self.shares, self._selected(tile) if self._mask_update else _ALL


class FusionJob(ElementwiseJob):
    """Keeps deltas with an importance of at least median + 1.5 · interquartile range.

    Usually one pass, for the exact quartiles. Stores the divergence of each row: 8 bytes per row.
    """

    def __init__(self, matrix: Matrix, epsilon: float) -> None:
        super().__init__(matrix, merge_fused, sums=1)
        self._epsilon = epsilon
        n = matrix.size
        # The element at ⌊q (n - 1)⌋ of the ascending order is the k-th largest with k = n - that.
        self._keys = [(IMPORTANCE, quarter) for quarter in (1, 2, 3)]
        ranks = {key: n - (key[1] * (n - 1)) // 4 for key in self._keys}
        self._selection = Selection(matrix, ranks if n else {}, self._factors)
        self._divergence = np.full(-(-n // matrix.row) if n else 0, np.nan)
        self.limit = 0.0

    def passes(self) -> int:
        return len(self._selection.plan())

    def statistics(self, number: int, tile: Tile) -> Any:
        return self._selection.statistics(self._selection.plan()[number], tile)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        self._selection.finish_pass(self._selection.plan()[number])
        bits = np.array([max(self._selection.threshold(key), 0) for key in self._keys], np.uint32)
        low, median, high = bits.view(np.float32).astype(np.float64)
        self.limit = median + 1.5 * (high - low)

    def _factors(self, tile: Tile) -> npt.NDArray[np.float64]:
        """The divergence of each row of the tile, cached."""
        m = self.matrix
        rows = self._divergence[tile.start // m.row : -(-(tile.start + tile.size) // m.row)]
        if len(rows) and np.isnan(rows[0]):
            scratch, sums = tile.scratch.rows(2, m.codes, m.out_code), tile.scratch.sums(4, m.row)
            row_divergence(EncodedInputs(tile.raw, m.codes), tile.size, m.row, self._epsilon, rows, scratch, sums)
        return rows

    def arguments(self, tile: Tile) -> tuple[Any, ...]:
        return self.limit, self._factors(tile), self.matrix.row
