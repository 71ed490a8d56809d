"""The exact k-th largest score of a matrix that is processed tile by tile: `Selection`, a part of a job.

Usually one pass: the first tile to arrive estimates a window of bit patterns around each k-th largest, and all tiles count the
elements in and above the windows. If an estimate missed, two more passes find the exact value (see `_kernels/select.py`).

The counts of each tile are kept until the pass ends, because they also locate the tile of the last tie. A large float32 tensor
has too many patterns for that: beyond a limit, the counts are summed in one array for the whole window, and if that would be
too long as well, the window counts as missed. If the last tie may then be in several tiles, one more pass locates it. None of
this affects the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.select import (
    HIGH_BINS,
    MAX_PATTERNS,
    TABLE,
    Patterns,
    Scores,
    count_high,
    count_windows,
    find_bin,
    index_of_tie,
)
from weightsmith.abc.job import Matrix, Result, Tile

Key = tuple[int, int]
"""The score (an input's number for its delta's magnitude, or a score of `kernels.select`), and the index of a rank."""


MAX_HELD = 1 << 20
"""Maximum number of per-tile patterns of one search: 8 MB. 10 GB of bf16 have fewer."""

MAX_WINDOW = 1 << 21
"""Maximum number of patterns of a window whose counts are summed in one array: 8 MB."""


@dataclass(slots=True)
class ThresholdSearch:
    """The search for one k-th largest element.

    rank    k, from 1
    first   first bit pattern of the window; -1: not estimated yet
    end     one past its last bit pattern
    missed  the estimate was wrong: the next pass counts `high`, int64 [HIGH_BINS], and the one after it a certain window
    threshold  the bits of the k-th largest; -1 until known
    quota   how many of the elements equal to it are among the k
    ties    how many elements are equal to it
    unknown  the tile of the last of these is not known
    """

    rank: int
    first: int = -1
    end: int = -1
    missed: bool = False
    threshold: int = -1
    quota: int = 0
    ties: int = 0
    unknown: bool = False
    high: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def set_window(self, high: npt.NDArray[np.uint32 | np.int64], first_rank: int, last_rank: int) -> None:
        """Search among the elements of these ranks. high: counts of all elements or of a sample, see `count_high`."""
        self.first = int(find_bin(high, last_rank)[0]) << 16
        self.end = (int(find_bin(high, first_rank)[0]) + 1) << 16

    def find(self, counted: Counted) -> bool:
        """Find the k-th largest among the patterns of the window. False, and `missed`, if it is not there."""
        patterns, numbers = counted.patterns()
        rank = self.rank - counted.above  # among the patterns
        if not counted.whole or not 0 < rank <= int(numbers.sum()):
            self.missed = True
            self.high = np.zeros(HIGH_BINS, np.int64)
            return False
        at_least = np.cumsum(numbers[::-1])
        place = int(np.searchsorted(at_least, rank))  # counted from the largest
        at = len(patterns) - 1 - place
        self.threshold, self.ties = int(patterns[at]), int(numbers[at])
        self.quota = rank - (int(at_least[place - 1]) if place else 0)
        return True


@dataclass(frozen=True, slots=True)
class Counts:
    """One tile's counts for one window: elements above it, patterns inside with their numbers, and the tile's start.

    complete  False if there were too many patterns to count
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
    searches: Sequence[ThresholdSearch],
    factors: npt.NDArray[np.float64],
    rows: npt.NDArray[Any],
) -> list[Counts]:
    """Count one tile's scores in the window of each search; what and factors as for `kernels.select.Scores`."""
    scratch = tile.scratch
    patterns, numbers, slots = table = Patterns(*scratch.table(TABLE, MAX_PATTERNS))
    firsts, ends = np.array([s.first for s in searches]), np.array([s.end for s in searches])
    above = np.zeros(len(searches), np.int64)
    scores = Scores(tile.raw, matrix.codes, what, factors, matrix.row, rows, scratch.bits)
    n = count_windows(scores, tile.size, firsts, ends, above, table)
    used = slots[: n if n >= 0 else MAX_PATTERNS]
    patterns_seen, often = patterns[used], numbers[used]
    numbers[used] = 0  # reset the table
    if n < 0 and len(searches) > 1:  # too many for one table: count one by one
        return [count_patterns(matrix, tile, what, [search], factors, rows)[0] for search in searches]
    inside = [(patterns_seen >= search.first) & (patterns_seen < search.end) for search in searches]
    return [
        Counts(tile.start, int(higher), patterns_seen[here], often[here], n >= 0)
        for higher, here in zip(above, inside, strict=True)
    ]


def kept_ranks(size: int, density: float, gamma: float) -> tuple[int, int]:
    """The first rank to keep, and one past the last, of `size` magnitudes in descending order.

    Drops the share gamma of the largest and keeps density · size of the rest; drops fewer if not enough would be left.

    >>> kept_ranks(1000, 0.9, 0.01), kept_ranks(1000, 1.0, 0.01), kept_ranks(50, 0.5, 0.01)
    ((10, 910), (0, 1000), (0, 25))
    """
    kept = size if density >= 1 else max(1, int(density * size))
    first = min(int(gamma * size), size - kept)
    return first, first + kept


class Counted:
    """Accumulates the counts of all tiles in one window.

    first, end  the window: its first bit pattern, and one past the last
    size        elements that are counted
    most        maximum number of patterns of a window whose counts are summed in one array
    above       elements above the window so far
    whole       False if a tile, or the window, had too many patterns to count
    tiles       by tile; empty once they are summed in `total`, unsigned [end - first]
    """

    def __init__(self, first: int, end: int, size: int, most: int) -> None:
        self.first = first
        self.end = end
        self._most = most
        self.above = 0
        self.whole = True
        self.tiles: list[Counts] = []
        self.total: npt.NDArray[np.uint32 | np.uint64] | None = None
        self._kind = np.uint32 if size < 1 << 32 else np.uint64
        self._held = 0

    def add(self, counts: Counts) -> None:
        """Add the counts of a tile, in any order."""
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
                self._free_tiles()

    def to_arrays(self) -> list[npt.NDArray[Any]]:
        """What it has counted, for `add_arrays`: elements above the window and whether it is whole, patterns, their numbers."""
        patterns, numbers = self.patterns()
        return [np.array([self.above, self.whole], np.int64), patterns, numbers.astype(np.uint64)]

    def add_arrays(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Add what was counted elsewhere: see `to_arrays`."""
        (above, whole), patterns, numbers = arrays
        self.add(Counts(0, int(above), patterns, numbers, bool(whole)))

    def _free_tiles(self) -> None:
        """Sum the counts of all tiles, and free them."""
        self.whole = self.end - self.first <= self._most
        if self.whole:
            self.total = np.zeros(self.end - self.first, self._kind)
            for counts in self.tiles:
                self._add_up(counts)
        self.tiles.clear()

    def _add_up(self, counts: Counts) -> None:
        assert self.total is not None
        self.total[counts.patterns - np.uint32(self.first)] += counts.numbers  # patterns are unique within a tile

    def patterns(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """The patterns found, ascending, and their numbers."""
        if self.total is not None:
            used = np.flatnonzero(self.total)
            return (used + self.first).astype(np.uint32), self.total[used].astype(np.int64)
        none = np.zeros(0, np.uint32)
        patterns, where = np.unique(np.concatenate([none, *(t.patterns for t in self.tiles)]), return_inverse=True)
        numbers = np.bincount(where, np.concatenate([none, *(t.numbers for t in self.tiles)]), len(patterns))
        return patterns, numbers.astype(np.int64)


class Selection:
    """Finds the k-th largest of several scores at once. Thread-safe, like a job's statistics.

    matrix   the matrix of the tiles
    ranks    k for each key, from 1 to the number of elements
    factors  float64 [rows of the tile] that a score of rows is multiplied by (`kernels.select.IMPORTANCE`)
    """

    def __init__(
        self,
        matrix: Matrix,
        ranks: Mapping[Key, int],
        factors: Callable[[Tile], npt.NDArray[np.float64]] | None = None,
    ) -> None:
        self.matrix = matrix
        self.searches = {key: ThresholdSearch(rank) for key, rank in ranks.items()}
        self._factors = factors
        self._lock = threading.Lock()
        self._counted: dict[Key, Counted] = {}  # of the current pass
        self._ties: dict[Key, tuple[int, int]] = {}  # the tile of the last tie among the k, and how many are in it

    def plan(self) -> list[str]:
        """The passes, as arguments for `statistics` and `finish_pass`. May grow until the first `finish_pass`."""
        searches = self.searches.values()
        if not searches:
            return []
        missed = ["high", "sure"] if any(s.missed for s in searches) else []
        return ["window", *missed, *(["ties"] if any(s.unknown for s in searches) else [])]

    def statistics(self, kind: str, tile: Tile) -> None:
        """Count one tile. The counts are stored in this object, so the pass returns no results."""
        if kind == "high":
            self._count_high(tile)
        else:
            self._count_window(kind, tile)

    def finish_pass(self, kind: str) -> None:
        """Finish a pass, after all tiles."""
        if kind == "high":
            for search in self.searches.values():
                if search.missed:
                    search.set_window(search.high, search.rank, search.rank)
                    search.high = np.zeros(0, np.int64)
        elif kind == "ties":
            for key, counted in self._counted.items():
                self._find_tie(key, self.searches[key], counted)
        else:
            for key, counted in self._counted.items():
                self._find(key, self.searches[key], counted)
        self._counted = {}

    def threshold(self, key: Key) -> int:
        """Bits of the k-th largest, after all passes."""
        return self.searches[key].threshold

    def cut(self, key: Key, tile: Tile) -> int:
        """The flat index in this tile below which elements equal to the threshold are among the k."""
        m = self.matrix
        start, quota = self._ties[key]
        if tile.start < start:
            return m.size
        if tile.start > start:
            return 0
        rows = tile.scratch.rows(2, m.codes, m.out_code)
        scores = Scores(tile.raw, m.codes, key[0], self._row_factors(tile), m.row, rows, tile.scratch.bits)
        return start + int(index_of_tie(scores, tile.size, self.searches[key].threshold, quota))

    def _row_factors(self, tile: Tile) -> npt.NDArray[np.float64]:
        return _NONE if self._factors is None else self._factors(tile)

    def _count_window(self, kind: str, tile: Tile) -> None:
        m, scratch = self.matrix, tile.scratch
        rows = scratch.rows(2, m.codes, m.out_code)
        factors = self._row_factors(tile)
        together: dict[int, list[tuple[Key, ThresholdSearch]]] = {}  # grouped by score, which is computed once
        for key, search in self.searches.items():
            if (kind == "sure" and not search.missed) or (kind == "ties" and not search.unknown):
                continue
            if kind == "window":
                self._guess(key, search, tile, factors)
            together.setdefault(key[0], []).append((key, search))
        for what, searches in together.items():
            counts_of_search = count_patterns(m, tile, what, [search for _, search in searches], factors, rows)
            with self._lock:
                for (key, search), counts in zip(searches, counts_of_search, strict=True):
                    self._counted.setdefault(key, Counted(search.first, search.end, m.size, MAX_WINDOW)).add(counts)

    def _guess(self, key: Key, search: ThresholdSearch, tile: Tile, factors: npt.NDArray[np.float64]) -> None:
        """Estimate the window of the k-th largest from the first tile to arrive."""
        with self._lock:
            if search.first >= 0:
                return
            m, scratch = self.matrix, tile.scratch
            rows = scratch.rows(2, m.codes, m.out_code)
            high = scratch.counts(HIGH_BINS)
            count_high(Scores(tile.raw, m.codes, key[0], factors, m.row, rows, scratch.bits), tile.size, high)
            share = search.rank / m.size
            # The standard deviation of ranks in a tile is about sqrt(p (1 - p) n); rows differ by slightly more.
            slack = 6 * math.sqrt(share * (1 - share) * tile.size) + tile.size / 500
            middle = share * tile.size
            search.set_window(high, max(1, round(middle - slack)), min(tile.size, round(middle + slack)))

    def _count_high(self, tile: Tile) -> None:
        m, scratch = self.matrix, tile.scratch
        rows = scratch.rows(2, m.codes, m.out_code)
        factors = self._row_factors(tile)
        for key, search in self.searches.items():
            if search.missed:
                counts = scratch.counts(HIGH_BINS)
                count_high(Scores(tile.raw, m.codes, key[0], factors, m.row, rows, scratch.bits), tile.size, counts)
                with self._lock:
                    np.add(search.high, counts, out=search.high)

    def _find(self, key: Key, search: ThresholdSearch, counted: Counted) -> None:
        """Find the k-th largest among the patterns of a window, if it is there, and the tile of its last tie."""
        if not search.find(counted):
            return
        if counted.total is None:
            self._find_tie(key, search, counted)
        elif search.quota == search.ties:
            self._ties[key] = self.matrix.size, 0  # all ties are among the k: no tile has a cut
        else:
            search.unknown = True
            search.first, search.end = search.threshold, search.threshold + 1

    def _find_tie(self, key: Key, search: ThresholdSearch, counted: Counted) -> None:
        """Find the tile of the last of the first `quota` elements equal to the threshold."""
        quota = search.quota
        for tile in sorted(counted.tiles, key=lambda counts: counts.start):
            ties = int(tile.numbers[tile.patterns == search.threshold].sum())
            if quota <= ties:
                self._ties[key] = tile.start, quota
                return
            quota -= ties


_NONE = np.zeros(0)


def model_limits(result: Result, model: int, density: float, gamma: float) -> tuple[int, int]:
    """A model's limits from a `thresholds` product: bits of the smallest magnitude to keep, and of the smallest that is too
    large (2^31 - 1: none)."""
    k = result.settings["wanted"].index([result.models.index(model), density, gamma])
    low, high = result.arrays[0][k]
    return int(low), int(high)
