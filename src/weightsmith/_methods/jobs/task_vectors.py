"""The job of task arithmetic, TIES, DARE, DELLA, breadcrumbs and similar methods: a few axes, one kernel.

Passes over the inputs, each only if needed: one for exact thresholds (two more if the estimate missed, see `selection.py`),
one for L1 norms, one to apply. Thresholds over the whole model are a product.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith._kernels import task_vector as kernel
from weightsmith._kernels.codecs import BLOCK, Encoded, EncodedInputs
from weightsmith._methods.jobs.selection import Key, Selection, kept_ranks, model_limits
from weightsmith.abc.job import Bytes, Job, Matrix, Scratch, Tile

# ---- The building blocks of the task-vector methods


Sparsifier = Literal["none", "magnitude", "magnitude_outliers", "random", "row_rank", "groups"]
Scope = Literal["tensor", "row", "model"]
Rescale = Literal["none", "l1", "inv_density", "inv_probability"]
Election = Literal["none", "sum", "count"]
Combine = Literal["sum", "mean", "disjoint_mean", "absmax"]


@dataclass(frozen=True, slots=True)
class Axes:
    """A method of the family and its parameters. Per-model parameters (weight, density to group) are in the models' order.

    sparsifier  `magnitude` keeps the largest deltas, `magnitude_outliers` the largest except for outliers, `random` each with
                probability density, `row_rank` each with a probability that grows with its rank in the row, `groups` the
                largest of each group of neighbours that no earlier model has kept
    weight      factor on a model's delta
    factor      lambda
    density     share of a delta to keep; () for `none`. The next three are also () if the sparsifier does not use them
    gamma       share of outliers, for `magnitude_outliers`
    epsilon     half of the range of probabilities, for `row_rank`
    group       group size, for `groups`
    scope       where magnitudes are ranked: in the tensor, each row, or all tensors of the model
    rescale     factor on the remaining delta: `l1` restores the tensor's L1 norm, `inv_density` is 1/density,
                `inv_probability` the inverse of each element's probability
    elect       drop contributions against the elected sign
    combine     `sum`; `mean`, divided by the sum of the weights (after an election, by the sum of |weight| of those that
                agree); `disjoint_mean`, divided by the number of contributing models; `absmax`, only the largest
    """

    sparsifier: Sparsifier
    weight: Sequence[float]
    factor: float
    density: Sequence[float] = ()
    gamma: Sequence[float] = ()
    epsilon: Sequence[float] = ()
    group: Sequence[int] = ()
    scope: Scope = "tensor"
    rescale: Rescale = "none"
    elect: Election = "none"
    combine: Combine = "sum"


_ELECT = {"none": kernel.ELECT_NONE, "sum": kernel.ELECT_SUM, "count": kernel.ELECT_COUNT}
_MEAN = {"sum": kernel.SUM, "mean": kernel.BY_WEIGHT, "disjoint_mean": kernel.BY_COUNT, "absmax": kernel.LARGEST}
_WHOLE_ROWS = (kernel.KEEP_ROW_RANKS, kernel.KEEP_BY_RANK, kernel.KEEP_GROUPS)
_SLOW = (*_WHOLE_ROWS, kernel.KEEP_RANDOM)
_NOTHING_LARGER = 0x7FFFFFFF

REMEMBER_BYTES = 64 << 20
"""Maximum size of masks that are kept from the pass for norms (1 bit per element) because they are slow to compute."""


def random_key(seed: int, model: int, tensor: str) -> int:
    """64-bit key of the masks of one model's tensor."""
    return xxhash.xxh3_64_intdigest(f"{model}\0{tensor}".encode(), seed=seed & (2**64 - 1))


class TaskVectorJob(Job):
    """One matrix of a task-vector merge; input 0 is the base."""

    def __init__(self, matrix: Matrix, axes: Axes) -> None:
        super().__init__(matrix)
        self.axes = axes
        self.weights = np.array(axes.weight, np.float64)
        models = len(self.weights)
        self.scales = np.ones(models)
        self.modes = np.full(models, kernel.KEEP_ALL, np.int64)
        self.limits = np.zeros((models, 2), np.int64)
        self.shares = np.zeros((models, 2))
        # Counts fine-tunes of weight 0 too: the masks of the others must not change if a weight becomes 0.
        self.keys = np.array([random_key(matrix.seed, place - 1, matrix.name) for place in matrix.places[1:]], np.uint64)
        self._own_cuts = np.zeros((models, 2), np.int64)
        self._selected: list[tuple[int, int, Key]] = []  # model, index of the limit, and the limit's key
        ranks: dict[Key, int] = {}
        if axes.sparsifier != "none":
            for i in range(models):
                self._set_mode(i, ranks)
        self._selection = Selection(matrix, ranks)
        self._memory: MutableMapping[object, Any] | None = None
        self._selected_before = False
        self._mean = _MEAN[axes.combine]
        self._elect = _ELECT[axes.elect]
        if self._elect == kernel.ELECT_SUM and models == 2 and self._mean != kernel.LARGEST:
            self._elect = kernel.ELECT_PAIR
        self.factor = axes.factor
        if axes.combine == "mean" and axes.elect == "none":
            total = float(np.cumsum(self.weights)[-1]) if models else 1.0
            self.factor /= total if abs(total) >= 1e-8 else 1.0
            self._mean = kernel.SUM
        masked = ~np.isin(self.modes, (kernel.KEEP_ALL, kernel.KEEP_NONE))
        self._norms_needed = axes.rescale == "l1" and bool(masked.any())
        self._in_rows = bool(np.isin(self.modes, _WHOLE_ROWS).any())
        mask_bytes = models * -(-matrix.size // 8)
        slow = bool(np.isin(self.modes, _SLOW).any())
        self._remember = self._norms_needed and slow and mask_bytes <= REMEMBER_BYTES
        self.resident_bytes = mask_bytes if self._remember else 0
        self._none_chosen = np.empty((models, 0), np.uint8)
        self._masks_of: dict[int, npt.NDArray[np.uint8]] = {}  # by tile: bits of its masks, [models, bytes]
        self.block = matrix.row if self._in_rows else BLOCK

    # ---- masks

    def _set_mode(self, i: int, ranks: dict[Key, int]) -> None:
        """Set the mask of model i from its parameters; adds the order statistics it needs to `ranks`."""
        axes, sparsifier = self.axes, self.axes.sparsifier
        density = float(axes.density[i])
        gamma = float(axes.gamma[i]) if sparsifier == "magnitude_outliers" else 0.0
        if density <= 0:
            self.modes[i] = kernel.KEEP_NONE
        elif sparsifier == "groups":
            group = int(axes.group[i])
            self.modes[i] = kernel.KEEP_GROUPS
            self.limits[i] = max(1, round(density * group)), group
        elif density >= 1:
            pass  # everything is kept
        elif sparsifier == "random":
            self.modes[i] = kernel.KEEP_RANDOM
            self.limits[i, 0] = round(density * 2.0**32)
        elif sparsifier == "row_rank":
            self.modes[i] = kernel.KEEP_BY_RANK
            self.shares[i] = density, axes.epsilon[i]
        else:
            self._set_magnitudes(i, density, gamma, ranks)
        if axes.rescale == "inv_density" and density > 0:
            self.scales[i] = 1 / density

    def _set_magnitudes(self, i: int, density: float, gamma: float, ranks: dict[Key, int]) -> None:
        m, scope = self.matrix, self.axes.scope
        if scope == "row":
            self.modes[i] = kernel.KEEP_ROW_RANKS
            self.limits[i] = kept_ranks(m.row, density, gamma)
            return
        self.modes[i] = kernel.KEEP_LARGE if gamma <= 0 else kernel.KEEP_BAND
        if scope == "model":
            # Keeps ties with the lower threshold, and drops ties with the upper one.
            self.limits[i] = model_limits(m.results[0], m.inputs[1 + i], density, gamma)
            self._own_cuts[i] = m.size
            return
        self.limits[i, 1] = _NOTHING_LARGER
        first, end = kept_ranks(m.size, density, gamma)
        if end < m.size:
            ranks[i + 1, 0] = end
            self._selected.append((i, 0, (i + 1, 0)))
        else:
            self._own_cuts[i, 0] = m.size  # keeps all ties
        if first > 0:
            ranks[i + 1, 1] = first
            self._selected.append((i, 1, (i + 1, 1)))

    def _cuts(self, tile: Tile) -> npt.NDArray[np.int64]:
        """Per model, the flat indices below which elements equal to its thresholds are among the largest."""
        cuts = self._own_cuts.copy()
        for i, which, key in self._selected:
            cuts[i, which] = self._selection.cut(key, tile)
        return cuts

    # ---- passes

    def recall(self, memory: MutableMapping[object, Any]) -> None:
        """Thresholds depend on the inputs and on the ranks alone: not on weights."""
        ranks = {key: search.rank for key, search in self._selection.searches.items()}
        if memory.get("ranks") == ranks:
            self._selection, self._selected_before = memory["selection"], True
            self._set_limits()
        elif ranks:
            self._memory = memory

    def passes(self) -> int:
        """May grow until the first `finish_pass`."""
        return len(self._plan())

    def _plan(self) -> list[str]:
        selection = [] if self._selected_before else self._selection.plan()
        return selection + (["norms"] if self._norms_needed else [])

    def statistics(self, number: int, tile: Tile) -> Any:
        kind = self._plan()[number]
        return self._norms(tile) if kind == "norms" else self._selection.statistics(kind, tile)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        kind = self._plan()[number]
        if kind == "norms":
            self._finish_norms(results)
            return
        self._selection.finish_pass(kind)
        self._set_limits()
        if self._memory is not None and number + 1 == len(self._selection.plan()):
            ranks = {key: search.rank for key, search in self._selection.searches.items()}
            self._memory.update(ranks=ranks, selection=self._selection)

    def _set_limits(self) -> None:
        for i, which, key in self._selected:
            self.limits[i, which] = self._selection.threshold(key)

    def _norms(self, tile: Tile) -> npt.NDArray[np.float64]:
        """float64 [grains, models, 2]: L1 norms before and after the mask."""
        m, scratch = self.matrix, tile.scratch
        out = np.zeros((tile.grains(m.grain), len(self.weights), 2))
        kept = np.empty((len(self.weights), tile.size if self._remember else 0), np.uint8)
        rows = scratch.rows(2, m.codes, m.out_code, self.block)
        memory = kernel.MergeScratch(rows, scratch.sums(2 * len(self.weights)), *self._row_scratch(scratch))
        masks = self._masks(tile, self._none_chosen)
        kernel.l1_norms(EncodedInputs(tile.raw, m.codes), self._place(tile), m.grain, masks, out, memory, kept)
        if self._remember:
            self._masks_of[tile.start] = np.packbits(kept, axis=1)
        return out

    def _finish_norms(self, results: list[Any]) -> None:
        totals = np.cumsum(np.concatenate(results), axis=0)[-1]
        for i, (before, after) in enumerate(totals):
            # Like mergekit, do not rescale if either norm is below 1e-7.
            if self.modes[i] != kernel.KEEP_ALL and before >= 1e-7 and after >= 1e-7:
                self.scales[i] = before / after
        if self._remember:
            self.modes[np.isin(self.modes, _SLOW)] = kernel.KEEP_CHOSEN
            self.block = BLOCK
            self._in_rows = False

    def _place(self, tile: Tile) -> kernel.Place:
        return kernel.Place(tile.size, tile.start, self.block)

    def _masks(self, tile: Tile, chosen: npt.NDArray[np.uint8]) -> kernel.Masks:
        unbiased = self.axes.rescale == "inv_probability"
        return kernel.Masks(self.modes, self.limits, self._cuts(tile), self.shares, unbiased, self.keys, chosen)

    def _row_scratch(self, scratch: Scratch) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return scratch.row_sorting(self.block if self._in_rows else 0)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m, scratch = self.matrix, tile.scratch
        chosen = self._none_chosen
        if self._remember:
            chosen = np.unpackbits(self._masks_of[tile.start], axis=1, count=tile.size)
        how = kernel.Combination(self.weights, self.scales, self._elect, self._mean, self.factor)
        rows = scratch.rows(len(m.codes) + 3, m.codes, m.out_code, self.block)
        memory = kernel.MergeScratch(rows, scratch.sums(1, self.block), *self._row_scratch(scratch))
        masks = self._masks(tile, chosen)
        kernel.merge_task_vectors(
            EncodedInputs(tile.raw, m.codes), self._place(tile), masks, how, Encoded(out, m.out_code), memory
        )
