"""The exact k-th largest of a score over a matrix that is seen tile by tile: `Selection`, a part of a job.

One pass as a rule: whichever tile comes first guesses a window of bit patterns around each k-th from itself, and all tiles
count what is in and above the windows. Where a guess was wrong two more passes find the k-th for certain (see
`kernels/select.py`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.jobs.job import Matrix, Tile
from weightsmith.kernels.select import (
    HIGH_BINS,
    MAX_PATTERNS,
    TABLE,
    count_high,
    count_window,
    find_bin,
    index_of_tie,
)

Key = tuple[int, int]
"""What is scored (the number of an input: its delta's magnitude; or a score of `kernels.select`), and which rank of it."""


@dataclass(slots=True)
class Search:
    """The search for one k-th largest.

    rank    k, from 1
    first   first bit pattern of the window that is counted; -1: not guessed yet
    end     one past its last
    missed  the guess was wrong: `high`, int64 [HIGH_BINS], is counted next, and then a window that is sure
    found   the bits of the k-th; -1 until known
    """

    rank: int
    first: int = -1
    end: int = -1
    missed: bool = False
    found: int = -1
    high: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class Counts:
    """What one tile holds of one window: elements above it, patterns inside, how often each; and the tile's start.

    complete  False when there were too many patterns to count
    """

    start: int
    above: int
    patterns: npt.NDArray[np.uint32]
    numbers: npt.NDArray[np.uint32]
    complete: bool


def count_patterns(
    matrix: Matrix, tile: Tile, what: int, search: Search, factors: npt.NDArray[np.float64], rows: npt.NDArray[Any]
) -> Counts:
    """Count one tile's scores in the window of a search; what and factors as for `kernels.select.score_bits`."""
    scratch = tile.scratch
    patterns, numbers, slots = scratch.table(TABLE, MAX_PATTERNS)
    above, n = count_window(
        *(tile.raw, matrix.codes, what, tile.size, search.first, search.end, patterns, numbers, slots),
        *(factors, matrix.row, rows, scratch.bits),
    )
    used = slots[: n if n >= 0 else MAX_PATTERNS]
    counts = Counts(tile.start, above, patterns[used], numbers[used], n >= 0)
    numbers[used] = 0  # the table is clean again
    return counts


def kept_ranks(size: int, density: float, gamma: float) -> tuple[int, int]:
    """First rank that is kept, and one past the last, of `size` magnitudes with the largest first.

    The share gamma, the largest, is dropped and density · size of the rest kept; when so much is not left, fewer are dropped.

    >>> kept_ranks(1000, 0.9, 0.01), kept_ranks(1000, 1.0, 0.01), kept_ranks(50, 0.5, 0.01)
    ((10, 910), (0, 1000), (0, 25))
    """
    kept = size if density >= 1 else max(1, int(density * size))
    first = min(int(gamma * size), size - kept)
    return first, first + kept


class Selection:
    """Finds the k-th largest of several scores at once. Thread-safe as a job's statistics are.

    matrix   whose tiles are counted
    ranks    for each key its k, from 1 to the number of elements
    factors  float64 [rows of the tile] that a score of rows is multiplied by (`kernels.select.IMPORTANCE`)
    """

    def __init__(
        self,
        matrix: Matrix,
        ranks: Mapping[Key, int],
        factors: Callable[[Tile], npt.NDArray[np.float64]] | None = None,
    ) -> None:
        self.matrix = matrix
        self.searches = {key: Search(rank) for key, rank in ranks.items()}
        self._factors = factors
        self._lock = threading.Lock()
        self._ties: dict[Key, tuple[int, int]] = {}  # the tile that holds the last tie among the k, and how many are in it

    def plan(self) -> list[str]:
        """The passes, each to be given to `statistics` and `fold`; known for certain once the first is folded in."""
        if not self.searches:
            return []
        return ["window", "high", "sure"] if any(s.missed for s in self.searches.values()) else ["window"]

    def statistics(self, kind: str, tile: Tile) -> Any:
        """Counts of one tile."""
        return self._count_high(tile) if kind == "high" else self._count_window(tile, sure=kind == "sure")

    def fold(self, kind: str, results: list[Any]) -> None:
        """Take in the counts of all tiles, in order."""
        if kind == "high":
            for search in self.searches.values():
                if search.missed:
                    search.first = int(find_bin(search.high, search.rank)[0]) << 16
                    search.end = search.first + (1 << 16)
        else:
            self._fold_window(results, sure=kind == "sure")

    def threshold(self, key: Key) -> int:
        """Bits of the k-th largest, once all passes are folded in."""
        return self.searches[key].found

    def cut(self, key: Key, tile: Tile) -> int:
        """The flat index below which, in this tile, elements equal to the threshold are among the k."""
        m = self.matrix
        start, quota = self._ties[key]
        if tile.start < start:
            return m.size
        if tile.start > start:
            return 0
        rows = tile.scratch.rows(2, m.codes, m.out_code)
        where = (tile.raw, m.codes, key[0], tile.size, self.searches[key].found, quota)
        return start + int(index_of_tie(*where, self._row_factors(tile), m.row, rows, tile.scratch.bits))

    def _row_factors(self, tile: Tile) -> npt.NDArray[np.float64]:
        return _NONE if self._factors is None else self._factors(tile)

    def _count_window(self, tile: Tile, *, sure: bool) -> dict[Key, Counts]:
        m, scratch = self.matrix, tile.scratch
        rows = scratch.rows(2, m.codes, m.out_code)
        factors = self._row_factors(tile)
        found = {}
        for key, search in self.searches.items():
            if sure and not search.missed:
                continue
            if not sure:
                self._guess(key, search, tile, factors)
            found[key] = count_patterns(m, tile, key[0], search, factors, rows)
        return found

    def _guess(self, key: Key, search: Search, tile: Tile, factors: npt.NDArray[np.float64]) -> None:
        """Whichever tile comes first guesses, from itself alone, where the k-th will be."""
        with self._lock:
            if search.first >= 0:
                return
            m, scratch = self.matrix, tile.scratch
            rows = scratch.rows(2, m.codes, m.out_code)
            high = scratch.counts(HIGH_BINS)
            count_high(tile.raw, m.codes, key[0], tile.size, high, factors, m.row, rows, scratch.bits)
            share = search.rank / m.size
            # Ranks within a tile scatter like sqrt(p (1 - p) n); rows differ among each other by a little more.
            slack = 6 * math.sqrt(share * (1 - share) * tile.size) + tile.size / 500
            search.first = int(find_bin(high, min(tile.size, round(share * tile.size + slack)))[0]) << 16
            search.end = (int(find_bin(high, max(1, round(share * tile.size - slack)))[0]) + 1) << 16

    def _count_high(self, tile: Tile) -> None:
        m, scratch = self.matrix, tile.scratch
        rows = scratch.rows(2, m.codes, m.out_code)
        factors = self._row_factors(tile)
        for key, search in self.searches.items():
            if search.missed:
                counts = scratch.counts(HIGH_BINS)
                count_high(tile.raw, m.codes, key[0], tile.size, counts, factors, m.row, rows, scratch.bits)
                with self._lock:
                    np.add(search.high, counts, out=search.high)

    def _fold_window(self, results: list[dict[Key, Counts]], *, sure: bool) -> None:
        for key, search in self.searches.items():
            if sure and not search.missed:
                continue
            tiles = [tile[key] for tile in results]
            above = sum(tile.above for tile in tiles)
            inside = sum(int(tile.numbers.sum()) for tile in tiles)
            if all(tile.complete for tile in tiles) and above < search.rank <= above + inside:
                self._set_threshold(key, search, search.rank - above, tiles)
            else:
                search.missed = True
                search.high = np.zeros(HIGH_BINS, np.int64)

    def _set_threshold(self, key: Key, search: Search, rank: int, tiles: list[Counts]) -> None:
        """The threshold is the `rank`-th largest of the patterns counted."""
        patterns, where = np.unique(np.concatenate([tile.patterns for tile in tiles]), return_inverse=True)
        numbers = np.bincount(where, np.concatenate([tile.numbers for tile in tiles])).astype(np.int64)
        at_least = np.cumsum(numbers[::-1])
        place = int(np.searchsorted(at_least, rank))  # counted from the largest
        search.found = int(patterns[len(patterns) - 1 - place])
        # Of the elements equal to the threshold the first `quota` are among the k: find the tile in which the last one lies.
        quota = rank - (int(at_least[place - 1]) if place else 0)
        for tile in tiles:
            ties = int(tile.numbers[tile.patterns == search.found].sum())
            if quota <= ties:
                self._ties[key] = (tile.start, quota)
                return
            quota -= ties


_NONE = np.zeros(0)
