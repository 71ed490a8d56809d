"""Jobs that choose positions by a score over the whole matrix: SCE by variance among models, Arcee Fusion by importance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.divergence import row_divergence
from weightsmith._kernels.elementwise import count_varying, energies, merge_elected, merge_fused
from weightsmith._kernels.records import Encoded, Inputs
from weightsmith._kernels.select import IMPORTANCE, VARIANCE, Scores, select_scores
from weightsmith._methods.jobs.selection import Selection
from weightsmith.abc.job import Bytes, Job, Matrix, Tile

_ALL = np.zeros(0, np.uint8)
_NO_FACTORS = np.zeros(0)
_KEY = (VARIANCE, 0)


class SceJob(Job):
    """Select positions by variance, calculate each model's share from its energy there, erase minority signs.

    Passes: count positions that vary (only if a part is selected), find their threshold (one pass, or three if the estimate
    missed), energies, apply.
    """

    def __init__(self, matrix: Matrix, select_topk: float, *, mask_update: bool) -> None:
        """mask_update: positions not selected keep the base's value; else the selection affects only the shares."""
        super().__init__(matrix)
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

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch = self.matrix, tile.scratch
        selected = self._selected(tile) if self._mask_update else _ALL
        rows, sums = scratch.rows(len(m.codes), m.codes, m.out_code), scratch.sums(3)
        inputs, encoded = Inputs(tile.raw, m.codes), Encoded(out, m.out_code)
        merge_elected(inputs, tile.size, self.shares, selected, encoded, rows, sums)


class FusionJob(Job):
    """Keeps deltas with an importance of at least median + 1.5 · interquartile range.

    Usually one pass, for the exact quartiles. Stores the divergence of each row: 8 bytes per row.
    """

    def __init__(self, matrix: Matrix, epsilon: float) -> None:
        super().__init__(matrix)
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
            row_divergence(Inputs(tile.raw, m.codes), tile.size, m.row, self._epsilon, rows, scratch, sums)
        return rows

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch = self.matrix, tile.scratch
        rows, sums = scratch.rows(2, m.codes, m.out_code), scratch.sums(1)
        inputs, encoded = Inputs(tile.raw, m.codes), Encoded(out, m.out_code)
        merge_fused(inputs, tile.size, self.limit, self._factors(tile), m.row, encoded, rows, sums)
