"""What a method must know of the whole model before it merges the first tensor: a `Survey`, and the one for thresholds.

The engine shows a survey every tile of every tensor that the method merges, in one pass or more, and then gives it to the jobs
(`Matrix.survey`). It is asked for by a method only when parameters need it (`Method.survey`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.jobs.job import Matrix, Tile
from weightsmith.jobs.selection import Counts, Search, count_patterns, kept_ranks
from weightsmith.kernels.select import HIGH_BINS, count_high, find_bin

NO_FACTORS = np.zeros(0)

MAX_SPAN = 1 << 23
"""Patterns of a window that are counted one by one: 64 MB of counters. A wider one is narrowed by another pass first."""


class Survey(ABC):
    """Statistics over all tensors of a merge. Results must depend on grains alone, as those of jobs."""

    @abstractmethod
    def passes(self) -> int:
        """Number of passes; asked again after each `fold`."""

    def sampled(self, number: int) -> bool:
        """Pass `number` looks at the first grain of each tile only."""
        return False

    @abstractmethod
    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> Any:
        """Statistics of one tile. Called from many threads."""

    @abstractmethod
    def fold(self, number: int, results: Iterable[Any]) -> None:
        """Take in the statistics of all tiles, in plan order, as they come."""


class Thresholds(Survey):
    """For each model the magnitude that a share of all its deltas reach: exact, ties all kept.

    A sample of the tiles says where to look, and one pass counts there; two more when the sample misled.
    """

    def __init__(self, sizes: Mapping[int, int], wanted: Sequence[tuple[int, float, float]]) -> None:
        """sizes: elements of each model (a number in the plan); wanted: model, density and gamma."""
        self.searches: dict[tuple[int, int], Search] = {}
        self._ranks: dict[tuple[int, float, float], tuple[int, int]] = {}
        self._sizes = sizes
        for model, density, gamma in wanted:
            size = sizes[model]
            first, end = kept_ranks(size, density, gamma)
            self._ranks[model, density, gamma] = end, first
            for rank in (end, first):
                if 0 < rank < size:
                    self.searches[model, rank] = Search(rank)

    def of(self, model: int, density: float, gamma: float) -> tuple[int, int]:
        """Bits of the smallest magnitude kept and of the smallest that is too large (2^31 - 1: none)."""
        low, high = self._ranks[model, density, gamma]
        return (
            self.searches[model, low].found if low < self._sizes[model] else 0,
            self.searches[model, high].found if high > 0 else 0x7FFFFFFF,
        )

    def passes(self) -> int:
        if not self.searches:
            return 0
        return 4 if any(s.missed for s in self.searches.values()) else 2

    def sampled(self, number: int) -> bool:
        return number == 0

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> Any:
        if number in (0, 2):
            return self._high(matrix, tile)
        return self._window(number, matrix, tile)

    def fold(self, number: int, results: Iterable[Any]) -> None:
        if number in (0, 2):
            self._fold_high(number, results)
        else:
            self._fold_window(results)

    def _high(self, matrix: Matrix, tile: Tile) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """For each input (a model may be two of them) the bins in use, and their counts."""
        scratch, found = tile.scratch, []
        rows = scratch.rows(2, matrix.codes, matrix.out_code)
        models = {model for model, _ in self.searches}
        for i, model in enumerate(matrix.inputs):
            if i > 0 and model in models:
                counts = scratch.counts(HIGH_BINS)
                count_high(tile.raw, matrix.codes, i, tile.size, counts, NO_FACTORS, matrix.cols, rows, scratch.bits)
                used = np.flatnonzero(counts)
                found.append((model, np.stack([used, counts[used].astype(np.int64)])))
        return found

    def _fold_high(self, number: int, results: Iterable[list[tuple[int, npt.NDArray[np.int64]]]]) -> None:
        totals: dict[int, npt.NDArray[np.int64]] = {}
        for result in results:
            for model, (used, counts) in result:
                total = totals.setdefault(model, np.zeros(HIGH_BINS, np.int64))
                total[used] += counts
        for (model, rank), search in self.searches.items():
            high = totals[model]
            if number == 2:
                search.first = int(find_bin(high, rank)[0]) << 16
                search.end = search.first + (1 << 16)
                continue
            seen = int(high.sum())
            share = rank / self._sizes[model]
            # Grains of one tensor are alike: the sample says less than as many elements drawn one by one would.
            slack = min(0.01 + 0.05 * share, 0.002 + 0.2 * min(share, 1 - share))
            search.first = int(find_bin(high, min(seen, round((share + slack) * seen)))[0]) << 16
            search.end = (int(find_bin(high, max(1, round((share - slack) * seen)))[0]) + 1) << 16

    def _window(self, number: int, matrix: Matrix, tile: Tile) -> list[tuple[tuple[int, int], Counts]]:
        found = []
        rows = tile.scratch.rows(2, matrix.codes, matrix.out_code)
        for i, model in enumerate(matrix.inputs):
            for key, search in self.searches.items():
                if i == 0 or key[0] != model or (number == 3 and not search.missed):
                    continue
                found.append((key, count_patterns(matrix, tile, i, [search], NO_FACTORS, rows)[0]))
        return found

    def _fold_window(self, results: Iterable[list[tuple[tuple[int, int], Counts]]]) -> None:
        windows = {
            key: np.zeros(
                search.end - search.first if search.found < 0 and search.end - search.first <= MAX_SPAN else 0, np.int64
            )
            for key, search in self.searches.items()
        }
        above = dict.fromkeys(self.searches, 0)
        whole = {key: windows[key].size > 0 for key in windows}
        for result in results:
            for key, counts in result:
                above[key] += counts.above
                whole[key] &= counts.complete
                if whole[key]:
                    windows[key][counts.patterns - np.uint32(self.searches[key].first)] += counts.numbers
        for key, search in self.searches.items():
            if search.found >= 0:
                continue
            at_least = np.cumsum(windows[key][::-1])
            rank = search.rank - above[key]
            if whole[key] and 0 < rank <= at_least[-1]:
                search.found = search.end - 1 - int(np.searchsorted(at_least, rank))
            else:
                search.missed = True
