"""The exact k-th largest of a score over a matrix that is seen tile by tile: `Selection`, a part of a job.

One pass as a rule: whichever tile comes first guesses a window of bit patterns around each k-th from itself, and all tiles
count what is in and above the windows. Where a guess was wrong two more passes find the k-th for certain (see
`kernels/select.py`).

The counts of each tile are held until the pass ends, for they also say in which tile the last of equal magnitudes lies. A
large float32 tensor has too many patterns for that: beyond a bound they are added up in one array for the whole window, and if
that would be too long as well, the window counts as missed. Should the last of equal magnitudes then lie among several, one
more pass looks for its tile. None of it changes the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith.jobs.job import Matrix, Result, Tile
from weightsmith.kernels.select import (
    HIGH_BINS,
    MAX_PATTERNS,
    TABLE,
    count_high,
    count_windows,
    find_bin,
    index_of_tie,
)

Key = tuple[int, int]
"""What is scored (the number of an input: its delta's magnitude; or a score of `kernels.select`), and which rank of it."""


MAX_HELD = 1 << 20
"""Patterns of single tiles that one search holds: 8 MB. Those of 10 GB of bf16 are fewer."""

MAX_WINDOW = 1 << 21
"""Patterns of a window whose counts are added up in one array: 8 MB."""


@dataclass(slots=True)
class Search:
    """The search for one k-th largest.

    rank    k, from 1
    first   first bit pattern of the window that is counted; -1: not guessed yet
    end     one past its last
    missed  the guess was wrong: `high`, int64 [HIGH_BINS], is counted next, and then a window that is sure
    found   the bits of the k-th; -1 until known
    quota   of the elements equal to the k-th, the first so many are among the k
    unknown  it is not known in which tile the last of these lies
    """

    rank: int
    first: int = -1
    end: int = -1
    missed: bool = False
    found: int = -1
    quota: int = 0
    unknown: bool = False
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
    matrix: Matrix,
    tile: Tile,
    what: int,
    searches: Sequence[Search],
    factors: npt.NDArray[np.float64],
    rows: npt.NDArray[Any],
) -> list[Counts]:
    """Count one tile's scores in the windows of searches, for each; what and factors as for `kernels.select.score_bits`."""
    scratch = tile.scratch
    patterns, numbers, slots = scratch.table(TABLE, MAX_PATTERNS)
    firsts, ends = np.array([s.first for s in searches]), np.array([s.end for s in searches])
    above = np.zeros(len(searches), np.int64)
    n = count_windows(
        *(tile.raw, matrix.codes, what, tile.size, firsts, ends, above, patterns, numbers, slots),
        *(factors, matrix.row, rows, scratch.bits),
    )
    used = slots[: n if n >= 0 else MAX_PATTERNS]
    found, often = patterns[used], numbers[used]
    numbers[used] = 0  # the table is clean again
    if n < 0 and len(searches) > 1:  # too many together may be few enough one by one
        return [count_patterns(matrix, tile, what, [search], factors, rows)[0] for search in searches]
    inside = [(found >= search.first) & (found < search.end) for search in searches]
    return [
        Counts(tile.start, int(higher), found[here], often[here], n >= 0) for higher, here in zip(above, inside, strict=True)
    ]


def kept_ranks(size: int, density: float, gamma: float) -> tuple[int, int]:
    """First rank that is kept, and one past the last, of `size` magnitudes with the largest first.

    The share gamma, the largest, is dropped and density · size of the rest kept; when so much is not left, fewer are dropped.

    >>> kept_ranks(1000, 0.9, 0.01), kept_ranks(1000, 1.0, 0.01), kept_ranks(50, 0.5, 0.01)
    ((10, 910), (0, 1000), (0, 25))
    """
    kept = size if density >= 1 else max(1, int(density * size))
    first = min(int(gamma * size), size - kept)
    return first, first + kept


class Counted:
    """The counts of all tiles in one window, as they come.

    first, end  the window: its first bit pattern, and one past the last
    size        elements of the matrix
    above       elements beyond the window so far
    whole       False when a tile, or the window, had too many patterns to count
    tiles       by tile; empty once they are added up in `total`, unsigned [end - first]
    """

    def __init__(self, first: int, end: int, size: int) -> None:
        self.first = first
        self.end = end
        self.above = 0
        self.whole = True
        self.tiles: list[Counts] = []
        self.total: npt.NDArray[np.uint32 | np.uint64] | None = None
        self._kind = np.uint32 if size < 1 << 32 else np.uint64
        self._held = 0

    def add(self, counts: Counts) -> None:
        """Take in one tile, in any order."""
        self.above += counts.above
        self.whole &= counts.complete
        if not self.whole:
            self.tiles.clear()
            self.total = None
        elif self.total is not None:
            self._add_up(counts)
        else:
            self.tiles.append(counts)
            self._held += len(counts.patterns)
            if self._held > MAX_HELD:
                self._let_go()

    def _let_go(self) -> None:
        """Hold the sum of the counts, and not those of each tile."""
        self.whole = self.end - self.first <= MAX_WINDOW
        if self.whole:
            self.total = np.zeros(self.end - self.first, self._kind)
            for counts in self.tiles:
                self._add_up(counts)
        self.tiles.clear()

    def _add_up(self, counts: Counts) -> None:
        assert self.total is not None
        self.total[counts.patterns - np.uint32(self.first)] += counts.numbers  # a pattern is in a tile's list once

    def patterns(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """The patterns found, ascending, and how often each occurs."""
        if self.total is not None:
            used = np.flatnonzero(self.total)
            return (used + self.first).astype(np.uint32), self.total[used].astype(np.int64)
        none = np.zeros(0, np.uint32)
        patterns, where = np.unique(np.concatenate([none, *(t.patterns for t in self.tiles)]), return_inverse=True)
        numbers = np.bincount(where, np.concatenate([none, *(t.numbers for t in self.tiles)]), len(patterns))
        return patterns, numbers.astype(np.int64)


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
        self._counted: dict[Key, Counted] = {}  # in the pass that is on
        self._ties: dict[Key, tuple[int, int]] = {}  # the tile that holds the last tie among the k, and how many are in it

    def plan(self) -> list[str]:
        """The passes, each to be given to `statistics` and `fold`; known for certain once the first is folded in."""
        searches = self.searches.values()
        if not searches:
            return []
        missed = ["high", "sure"] if any(s.missed for s in searches) else []
        return ["window", *missed, *(["ties"] if any(s.unknown for s in searches) else [])]

    def statistics(self, kind: str, tile: Tile) -> None:
        """Count one tile. What is counted stays here: the pass that is on needs no results."""
        if kind == "high":
            self._count_high(tile)
        else:
            self._count_window(kind, tile)

    def fold(self, kind: str) -> None:
        """All tiles are counted."""
        if kind == "high":
            for search in self.searches.values():
                if search.missed:
                    search.first = int(find_bin(search.high, search.rank)[0]) << 16
                    search.end = search.first + (1 << 16)
        elif kind == "ties":
            for key, counted in self._counted.items():
                self._find_tie(key, self.searches[key], counted)
        else:
            for key, counted in self._counted.items():
                self._find(key, self.searches[key], counted)
        self._counted = {}

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

    def _count_window(self, kind: str, tile: Tile) -> None:
        m, scratch = self.matrix, tile.scratch
        rows = scratch.rows(2, m.codes, m.out_code)
        factors = self._row_factors(tile)
        together: dict[int, list[tuple[Key, Search]]] = {}  # the searches in one score, which is then computed once
        for key, search in self.searches.items():
            if (kind == "sure" and not search.missed) or (kind == "ties" and not search.unknown):
                continue
            if kind == "window":
                self._guess(key, search, tile, factors)
            together.setdefault(key[0], []).append((key, search))
        for what, wanted in together.items():
            found = count_patterns(m, tile, what, [search for _, search in wanted], factors, rows)
            with self._lock:
                for (key, search), counts in zip(wanted, found, strict=True):
                    self._counted.setdefault(key, Counted(search.first, search.end, m.size)).add(counts)

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

    def _find(self, key: Key, search: Search, counted: Counted) -> None:
        """The k-th among the patterns of a window, if it is there."""
        patterns, numbers = counted.patterns()
        rank = search.rank - counted.above  # among the patterns
        if not counted.whole or not 0 < rank <= int(numbers.sum()):
            search.missed = True
            search.high = np.zeros(HIGH_BINS, np.int64)
            return
        at_least = np.cumsum(numbers[::-1])
        place = int(np.searchsorted(at_least, rank))  # counted from the largest
        at = len(patterns) - 1 - place
        search.found = int(patterns[at])
        search.quota = rank - (int(at_least[place - 1]) if place else 0)
        if counted.total is None:
            self._find_tie(key, search, counted)
        elif search.quota == int(numbers[at]):
            self._ties[key] = self.matrix.size, 0  # all of them: none lies beyond the cut of any tile
        else:
            search.unknown = True
            search.first, search.end = search.found, search.found + 1

    def _find_tie(self, key: Key, search: Search, counted: Counted) -> None:
        """The tile in which the last of the first `quota` elements equal to the threshold lies."""
        left = search.quota
        for tile in sorted(counted.tiles, key=lambda counts: counts.start):
            ties = int(tile.numbers[tile.patterns == search.found].sum())
            if left <= ties:
                self._ties[key] = tile.start, left
                return
            left -= ties


_NONE = np.zeros(0)


def model_limits(result: Result, model: int, density: float, gamma: float) -> tuple[int, int]:
    """What a model's magnitudes are compared with, from a `thresholds` product: bits of the smallest that is kept, and of the
    smallest that is too large (2^31 - 1: none)."""
    k = result.settings["wanted"].index([result.models.index(model), density, gamma])
    low, high = result.arrays[0][k]
    return int(low), int(high)
