"""The job behind task arithmetic, TIES and DARE: axes (sparsifier, rescale, election, normalisation), one kernel.

Passes over the inputs, each only if needed: one for exact thresholds (a second when its guess was wrong, see
`kernels/select.py`), one for L1 norms, one to apply.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith.kernels.select import HIGH_BINS, LOW_BINS, count, find_bin, index_of_tie, occupied
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


GUESSED_BINS = 3
"""Bins of the high histogram, each about half a per cent of the magnitude wide, whose low bits are counted on a guess."""


@dataclass(slots=True)
class Trim:
    """The search for one model's threshold.

    kept          elements to keep
    high          int64 [HIGH_BINS], summed over tiles
    first         first of the bins whose low bits are counted; -1: not guessed yet
    missed        the guess was wrong, and the low bits are counted once more
    """

    kept: int
    high: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(HIGH_BINS, np.int64))
    first: int = -1
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """Occupied low bins of one tile, and the tile's first element."""

    start: int
    places: npt.NDArray[np.uint32]
    numbers: npt.NDArray[np.uint32]


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
        """One or two for thresholds, and one for norms; known for certain once the first is folded in."""
        return len(self._plan())

    def _plan(self) -> list[str]:
        plan = ["count"] if self._trims else []
        plan += ["again"] if any(trim.missed for trim in self._trims.values()) else []
        return plan + (["norms"] if self._norms_needed else [])

    def statistics(self, number: int, tile: Tile) -> Any:
        kind = self._plan()[number]
        return self._norms(tile) if kind == "norms" else self._count(tile, again=kind == "again")

    def fold(self, number: int, results: list[Any]) -> None:
        kind = self._plan()[number]
        if kind == "norms":
            self._fold_norms(results)
        else:
            self._fold_counts(results, again=kind == "again")

    def _count(self, tile: Tile, *, again: bool) -> dict[int, Counts]:
        """For each trimmed model the tile's occupied low bins: a few KB."""
        m, scratch = self.matrix, tile.scratch
        rows = scratch.rows(2, m.codes, m.out_code)
        found = {}
        for i, trim in self._trims.items():
            if again and not trim.missed:
                continue
            if not again:
                self._guess(trim, i, tile)
            high, low = scratch.counts(HIGH_BINS), scratch.counts(GUESSED_BINS * LOW_BINS)
            count(tile.raw, m.codes, i + 1, tile.size, trim.first, high, low, rows, scratch.bits)
            if not again:
                with self._lock:
                    np.add(trim.high, high, out=trim.high)
            places, numbers = np.empty(tile.size, np.uint32), np.empty(tile.size, np.uint32)
            n = occupied(low, places, numbers)
            found[i] = Counts(tile.start, places[:n].copy(), numbers[:n].copy())
        return found

    def _guess(self, trim: Trim, i: int, tile: Tile) -> None:
        """Whichever tile is first guesses, from itself alone, in which bins the threshold will be."""
        with self._lock:
            if trim.first >= 0:
                return
            m, scratch = self.matrix, tile.scratch
            high = scratch.counts(HIGH_BINS)
            rows = scratch.rows(2, m.codes, m.out_code)
            count(tile.raw, m.codes, i + 1, tile.size, 0, high, high[:0], rows, scratch.bits)
            likely, _ = find_bin(high, max(1, round(trim.kept * tile.size / m.size)))
            trim.first = max(0, int(likely) - GUESSED_BINS // 2)

    def _fold_counts(self, results: list[dict[int, Counts]], *, again: bool) -> None:
        for i, trim in self._trims.items():
            if again and not trim.missed:
                continue
            bin_, above = (int(v) for v in find_bin(trim.high, trim.kept))
            if not trim.first <= bin_ < trim.first + GUESSED_BINS:
                trim.missed = True
                trim.first = bin_
            else:
                self._set_threshold(i, trim, bin_, above, [tile[i] for tile in results])

    def _set_threshold(self, i: int, trim: Trim, bin_: int, above: int, tiles: list[Counts]) -> None:
        offset = (bin_ - trim.first) * LOW_BINS
        total = np.zeros(LOW_BINS, np.int64)
        for tile in tiles:
            inside = (tile.places >= offset) & (tile.places < offset + LOW_BINS)
            total[tile.places[inside] - offset] += tile.numbers[inside]
        low, more = (int(v) for v in find_bin(total, trim.kept - above))
        self.limits[i] = bin_ << 16 | low
        # Of the elements equal to the threshold the first `quota` are kept: find the tile in which the last one lies.
        quota = trim.kept - above - more
        for tile in tiles:
            ties = int(tile.numbers[tile.places == offset + low].sum())
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
                local = index_of_tie(
                    tile.raw, m.codes, i + 1, tile.size, self.limits[i], quota, rows, tile.scratch.bits
                )
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
            scratch.rows(len(m.codes), m.codes, m.out_code),
            scratch.sums(3),
            scratch.words,
        )
