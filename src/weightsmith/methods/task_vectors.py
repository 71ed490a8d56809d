"""The job behind task arithmetic, TIES and DARE: axes (sparsifier, rescale, election, normalisation), one kernel.

Passes over the inputs, each only if needed: two for exact thresholds (`kernels/select.py`), one for L1 norms, one to apply.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith.kernels.select import HIGH_BINS, LOW_BINS, count_high, count_low, find_bin, index_of_tie
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
        self._high = {i: np.zeros(HIGH_BINS, np.int64) for i in self._sparse(KEEP_LARGE)}
        self._bins: dict[int, tuple[int, int]] = {}
        self._ties: dict[int, tuple[int, int]] = {}  # model → tile that holds its last kept tie, and how many are kept there
        self._plan = [f for f, needed in ((0, self._high), (1, self._high), (2, axes.rescale == "l1")) if needed]
        if not self._sparse(KEEP_LARGE, KEEP_RANDOM):
            self._plan = []

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
        return len(self._plan)

    def statistics(self, number: int, tile: Tile) -> Any:
        kind = self._plan[number]
        return (self._count_high, self._count_low, self._norms)[kind](tile)

    def fold(self, number: int, results: list[Any]) -> None:
        (self._fold_high, self._fold_low, self._fold_norms)[self._plan[number]](results)

    def _count_high(self, tile: Tile) -> None:
        m, scratch = self.matrix, tile.scratch
        rows = scratch.rows(2, m.codes, m.out_code)
        for i, total in self._high.items():
            counts = scratch.counts(HIGH_BINS)
            count_high(tile.raw, m.codes, i + 1, tile.size, counts, rows, scratch.bits)
            with self._lock:
                np.add(total, counts, out=total)

    def _fold_high(self, results: list[Any]) -> None:
        for i, total in self._high.items():
            high, above = find_bin(total, self.kept[i])
            self._bins[i] = int(high), int(above)
        self._high = dict.fromkeys(self._high)  # type: ignore[arg-type]  # 256 KiB a model, not needed again

    def _count_low(self, tile: Tile) -> list[tuple[int, npt.NDArray[np.uint16], npt.NDArray[np.uint32]]]:
        """For each trimmed model its start in the tile, and the occupied low bins with their counts: a few KB."""
        m, scratch = self.matrix, tile.scratch
        rows = scratch.rows(2, m.codes, m.out_code)
        found = []
        for i, (high, _) in self._bins.items():
            counts = scratch.counts(LOW_BINS)
            count_low(tile.raw, m.codes, i + 1, tile.size, high, counts, rows, scratch.bits)
            low = np.flatnonzero(counts)
            found.append((tile.start, low.astype(np.uint16), counts[low]))
        return found

    def _fold_low(self, results: list[Any]) -> None:
        for place, (i, (high, above)) in enumerate(self._bins.items()):
            total = np.zeros(LOW_BINS, np.int64)
            for tile in results:
                _, low, counts = tile[place]
                total[low] += counts
            low, more = find_bin(total, self.kept[i] - above)
            quota = int(self.kept[i] - above - more)
            self.modes[i] = KEEP_LARGE
            self.limits[i] = high << 16 | int(low)
            # Of the elements equal to the threshold the first `quota` are kept: find the tile in which the last one lies.
            for tile in results:
                start, values, counts = tile[place]
                ties = int(counts[values == low].sum())
                if quota <= ties:
                    self._ties[i] = (start, quota)
                    break
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
        rows, sums = scratch.rows(2, m.codes, m.out_code), scratch.sums(2)
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
                sums,
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
