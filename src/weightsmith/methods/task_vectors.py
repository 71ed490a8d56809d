"""The job behind task arithmetic, TIES and DARE: axes (sparsifier, rescale, election, normalisation), one kernel.

Passes over the inputs, each only if needed: one for exact thresholds (two more when its guess was wrong, see
`kernels/select.py`), one for L1 norms, one to apply.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith.kernels.select import (
    HIGH_BINS,
    MAX_PATTERNS,
    TABLE,
    count_high,
    count_window,
    find_bin,
    index_of_tie,
)
from weightsmith.kernels.task_vector import (
    KEEP_ALL,
    KEEP_LARGE,
    KEEP_NONE,
    KEEP_RANDOM,
    l1_norms,
    merge_task_vectors,
)
from weightsmith.methods.job import Bytes, Job, Matrix, Tile


@dataclass(frozen=True, slots=True)
class Axes:
    """A method of the family.

    sparsifier  `magnitude` keeps the largest deltas, `random` each with probability density
    rescale     what is left of a delta is multiplied by: `l1` what restores the tensor's L1 norm, `inv_density` 1/density
    elect       contributions against the elected sign are left out
    normalize   divide by the sum of the weights that contributed
    factor      lambda
    """

    sparsifier: Literal["none", "magnitude", "random"]
    rescale: Literal["none", "l1", "inv_density"]
    elect: bool
    normalize: bool
    factor: float


def random_key(seed: int, model: int, tensor: str) -> int:
    """64-bit key of the masks of one model's tensor."""
    return xxhash.xxh3_64_intdigest(f"{model}\0{tensor}".encode(), seed=seed & (2**64 - 1))


@dataclass(slots=True)
class Trim:
    """The search for one model's threshold.

    kept    elements to keep
    first   first bit pattern of the window that is counted; -1: not guessed yet
    end     one past its last
    missed  the guess was wrong: `high`, int64 [HIGH_BINS], is counted next, and then a window that is sure
    """

    kept: int
    first: int = -1
    end: int = -1
    missed: bool = False
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


class TaskVectorJob(Job):
    """One matrix of a task-vector merge; input 0 is the base."""

    def __init__(self, matrix: Matrix, axes: Axes) -> None:
        super().__init__(matrix)
        self.axes = axes
        self.weights = matrix.weights()
        models = len(self.weights)
        self.scales = np.ones(models)
        self.modes = np.full(models, KEEP_ALL, np.int64)
        self.limits = np.zeros(models, np.int64)
        self.keys = np.array([random_key(matrix.seed, i, matrix.name) for i in range(models)], np.uint64)
        self.kept = np.full(models, matrix.size, np.int64)
        if axes.sparsifier != "none":
            for i, density in enumerate(matrix.weights("density")):
                self._set_mode(i, float(density))
        factor = axes.factor
        if axes.normalize and not axes.elect:
            total = float(np.cumsum(self.weights)[-1]) if models else 1.0
            factor /= total if abs(total) >= 1e-8 else 1.0
        self.factor = factor
        self._lock = threading.Lock()
        self._trims = {i: Trim(int(self.kept[i])) for i in self._sparse(KEEP_LARGE)}
        self._ties: dict[int, tuple[int, int]] = {}  # model → tile that holds its last kept tie, and how many it keeps
        self._norms_needed = axes.rescale == "l1" and bool(self._sparse(KEEP_LARGE, KEEP_RANDOM))

    def _set_mode(self, i: int, density: float) -> None:
        if density >= 1:
            return
        if density <= 0:
            self.modes[i] = KEEP_NONE
        elif self.axes.sparsifier == "magnitude":
            self.modes[i] = KEEP_LARGE
            self.kept[i] = max(1, int(density * self.matrix.size))
        else:
            self.modes[i] = KEEP_RANDOM
            self.limits[i] = round(density * 2.0**32)
        if self.axes.rescale == "inv_density" and density > 0:
            self.scales[i] = 1 / density

    def _sparse(self, *modes: int) -> list[int]:
        return [i for i in range(len(self.modes)) if self.modes[i] in modes]

    def passes(self) -> int:
        """Known for certain once the first pass is folded in."""
        return len(self._plan())

    def _plan(self) -> list[str]:
        plan = ["window"] if self._trims else []
        plan += ["high", "sure"] if any(trim.missed for trim in self._trims.values()) else []
        return plan + (["norms"] if self._norms_needed else [])

    def statistics(self, number: int, tile: Tile) -> Any:
        kind = self._plan()[number]
        if kind == "norms":
            return self._norms(tile)
        if kind == "high":
            return self._count_high(tile)
        return self._count_window(tile, sure=kind == "sure")

    def fold(self, number: int, results: list[Any]) -> None:
        kind = self._plan()[number]
        if kind == "norms":
            self._fold_norms(results)
        elif kind == "high":
            for trim in self._trims.values():
                if trim.missed:
                    trim.first = int(find_bin(trim.high, trim.kept)[0]) << 16
                    trim.end = trim.first + (1 << 16)
        else:
            self._fold_window(results, sure=kind == "sure")

    def _count_window(self, tile: Tile, *, sure: bool) -> dict[int, Counts]:
        m, scratch = self.matrix, tile.scratch
        rows = scratch.rows(2, m.codes, m.out_code)
        found = {}
        for i, trim in self._trims.items():
            if sure and not trim.missed:
                continue
            if not sure:
                self._guess(trim, i, tile)
            patterns, numbers, slots = scratch.table(TABLE, MAX_PATTERNS)
            above, n = count_window(
                *(tile.raw, m.codes, i + 1, tile.size, trim.first, trim.end, patterns, numbers, slots),
                *(rows, scratch.bits),
            )
            used = slots[: n if n >= 0 else MAX_PATTERNS]
            found[i] = Counts(tile.start, above, patterns[used], numbers[used], n >= 0)
            numbers[used] = 0  # the table is clean again
        return found

    def _guess(self, trim: Trim, i: int, tile: Tile) -> None:
        """Whichever tile comes first guesses, from itself alone, where the threshold will be."""
        with self._lock:
            if trim.first >= 0:
                return
            m, scratch = self.matrix, tile.scratch
            rows = scratch.rows(2, m.codes, m.out_code)
            high = scratch.counts(HIGH_BINS)
            count_high(tile.raw, m.codes, i + 1, tile.size, high, rows, scratch.bits)
            share = trim.kept / m.size
            # Ranks within a tile scatter like sqrt(p (1 - p) n); rows differ among each other by a little more.
            slack = 6 * math.sqrt(share * (1 - share) * tile.size) + tile.size / 500
            trim.first = int(find_bin(high, min(tile.size, round(share * tile.size + slack)))[0]) << 16
            trim.end = (int(find_bin(high, max(1, round(share * tile.size - slack)))[0]) + 1) << 16

    def _count_high(self, tile: Tile) -> None:
        m, scratch = self.matrix, tile.scratch
        rows = scratch.rows(2, m.codes, m.out_code)
        for i, trim in self._trims.items():
            if trim.missed:
                counts = scratch.counts(HIGH_BINS)
                count_high(tile.raw, m.codes, i + 1, tile.size, counts, rows, scratch.bits)
                with self._lock:
                    np.add(trim.high, counts, out=trim.high)

    def _fold_window(self, results: list[dict[int, Counts]], *, sure: bool) -> None:
        for i, trim in self._trims.items():
            if sure and not trim.missed:
                continue
            tiles = [tile[i] for tile in results]
            above = sum(tile.above for tile in tiles)
            inside = sum(int(tile.numbers.sum()) for tile in tiles)
            if all(tile.complete for tile in tiles) and above < trim.kept <= above + inside:
                self._set_threshold(i, trim.kept - above, tiles)
            else:
                trim.missed = True
                trim.high = np.zeros(HIGH_BINS, np.int64)

    def _set_threshold(self, i: int, rank: int, tiles: list[Counts]) -> None:
        """The threshold is the `rank`-th largest of the patterns counted."""
        patterns, where = np.unique(np.concatenate([tile.patterns for tile in tiles]), return_inverse=True)
        numbers = np.bincount(where, np.concatenate([tile.numbers for tile in tiles])).astype(np.int64)
        at_least = np.cumsum(numbers[::-1])
        place = int(np.searchsorted(at_least, rank))  # counted from the largest
        threshold = int(patterns[len(patterns) - 1 - place])
        self.limits[i] = threshold
        # Of the elements equal to the threshold the first `quota` are kept: find the tile in which the last one lies.
        quota = rank - (int(at_least[place - 1]) if place else 0)
        for tile in tiles:
            ties = int(tile.numbers[tile.patterns == threshold].sum())
            if quota <= ties:
                self._ties[i] = (tile.start, quota)
                return
            quota -= ties

    def _cuts(self, tile: Tile) -> npt.NDArray[np.int64]:
        """Per model: the flat index in the tensor below which elements equal to the threshold are kept."""
        m = self.matrix
        cuts = np.zeros(len(self.weights), np.int64)
        for i, (start, quota) in self._ties.items():
            if tile.start < start:
                cuts[i] = m.index + m.size
            elif tile.start == start:
                rows = tile.scratch.rows(2, m.codes, m.out_code)
                local = index_of_tie(tile.raw, m.codes, i + 1, tile.size, self.limits[i], quota, rows, tile.scratch.bits)
                cuts[i] = m.index + start + local
        return cuts

    def _norms(self, tile: Tile) -> npt.NDArray[np.float64]:
        """float64 [grains, models, 2]: L1 norms before and after the mask."""
        m, scratch = self.matrix, tile.scratch
        cuts = self._cuts(tile)
        rows = scratch.rows(2, m.codes, m.out_code)
        out = np.zeros((tile.grains(m.grain), len(self.weights), 2))
        for i in self._sparse(KEEP_LARGE, KEEP_RANDOM):
            norms = np.empty((len(out), 2))
            l1_norms(
                tile.raw,
                m.codes,
                i + 1,
                tile.size,
                m.grain,
                m.index + tile.start,
                self.modes[i],
                self.limits[i],
                cuts[i],
                self.keys[i],
                norms,
                rows,
                scratch.sums(2),
                scratch.words,
            )
            out[:, i] = norms
        return out

    def _fold_norms(self, results: list[Any]) -> None:
        totals = np.cumsum(np.concatenate(results), axis=0)[-1]
        for i, (before, after) in enumerate(totals):
            # mergekit leaves a delta alone when either norm is below 1e-7, and so do we.
            if before >= 1e-7 and after >= 1e-7:
                self.scales[i] = before / after

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch = self.matrix, tile.scratch
        merge_task_vectors(
            tile.raw,
            m.codes,
            tile.size,
            m.index + tile.start,
            self.weights,
            self.scales,
            self.modes,
            self.limits,
            self._cuts(tile),
            self.keys,
            self.axes.elect,
            self.axes.normalize,
            self.factor,
            out,
            m.out_code,
            scratch.rows(len(m.codes) + 3, m.codes, m.out_code),
            scratch.sums(1),
            scratch.words,
        )
