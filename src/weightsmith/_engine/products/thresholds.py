"""Thresholds for `scope: model`: the magnitude that a given share of all deltas of a model reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.select import HIGH_BINS, Scores, count_high
from weightsmith._methods.jobs.selection import Counted, Counts, ThresholdSearch, count_patterns, kept_ranks
from weightsmith._plans import Product
from weightsmith._plans.codec import has_type
from weightsmith.abc.job import Matrix, Tile
from weightsmith.abc.product import Arrays, ProductKind, StreamingReduction

NO_FACTORS = np.zeros(0)

MAX_SPAN = 1 << 23
"""Bit patterns per window that are counted individually: 64 MB of counters. Wider windows are narrowed by another pass."""


class Thresholds(StreamingReduction):
    """The two magnitude limits for each wanted model, density and gamma. Exact; keeps all ties.

    A first pass samples the tiles to estimate a window, and a second counts inside it. Two more follow if the estimate missed.

    `Product.settings`: `sizes`, the element counts of `Product.models`; `wanted`, [index in models, density, gamma] each.
    The array is int64 [wanted, 2]: bits of the smallest magnitude kept, and of the smallest that is too large (2^31 - 1: none).
    """

    divisible = True

    def __init__(self, product: Product) -> None:
        limits: Sequence[tuple[int, float, float]] = product.settings["wanted"]
        self._sizes = dict(zip(product.models, product.settings["sizes"], strict=True))
        self.searches: dict[tuple[int, int], ThresholdSearch] = {}
        self._limits: list[tuple[int, int, int]] = []
        for k, density, gamma in limits:
            model = product.models[k]
            first, end = kept_ranks(self._sizes[model], density, gamma)
            self._limits.append((model, end, first))
            for rank in (end, first):
                if 0 < rank < self._sizes[model]:
                    self.searches[model, rank] = ThresholdSearch(rank)

    def arrays(self) -> Arrays:
        limits = [
            (
                self.searches[model, low].threshold if low < self._sizes[model] else 0,
                self.searches[model, high].threshold if high > 0 else 0x7FFFFFFF,
            )
            for model, low, high in self._limits
        ]
        return [np.array(limits, np.int64).reshape(-1, 2)]

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

    def begin(self, number: int) -> None:
        if number in (0, 2):
            self._totals: dict[int, npt.NDArray[np.int64]] = {}
            return
        self._counted = {
            key: Counted(search.first, search.end, self._sizes[key[0]], MAX_SPAN)
            for key, search in self.searches.items()
            if search.threshold < 0
        }

    def take(self, number: int, result: Any) -> None:
        if number in (0, 2):
            for model, (used, counts) in result:
                total = self._totals.setdefault(model, np.zeros(HIGH_BINS, np.int64))
                total[used] += counts
            return
        for key, counts in result:
            self._counted[key].add(counts)

    def partial(self, number: int) -> Arrays:
        if number in (0, 2):
            models = sorted(self._totals)
            none = np.zeros((0, HIGH_BINS), np.int64)
            return [np.array(models, np.int64), np.stack([self._totals[model] for model in models]) if models else none]
        return [array for key in sorted(self._counted) for array in self._counted[key].to_arrays()]

    def add(self, number: int, partial: Arrays) -> None:
        if number in (0, 2):
            models, counts = partial
            for model, count in zip(models.tolist(), counts, strict=True):
                self._totals[model] = self._totals.get(model, 0) + count
            return
        for i, key in enumerate(sorted(self._counted)):
            self._counted[key].add_arrays(partial[3 * i : 3 * i + 3])

    def end(self, number: int) -> None:
        if number in (0, 2):
            self._end_high(number)
        else:
            for key, counted in self._counted.items():
                self.searches[key].find(counted)

    def _high(self, matrix: Matrix, tile: Tile) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """For each input (a model may occur twice), the bins in use and their counts."""
        scratch, used_counts = tile.scratch, []
        rows = scratch.rows(2, matrix.codes, matrix.out_code)
        models = {model for model, _ in self.searches}
        for i, model in enumerate(matrix.inputs):
            if i > 0 and model in models:
                counts = scratch.counts(HIGH_BINS)
                scores = Scores(tile.raw, matrix.codes, i, NO_FACTORS, matrix.cols, rows, scratch.bits)
                count_high(scores, tile.size, counts)
                used = np.flatnonzero(counts)
                used_counts.append((model, np.stack([used, counts[used].astype(np.int64)])))
        return used_counts

    def _end_high(self, number: int) -> None:
        for (model, rank), search in self.searches.items():
            high = self._totals[model]
            if number == 2:
                search.set_window(high, rank, rank)
                continue
            seen = int(high.sum())
            share = rank / self._sizes[model]
            # Elements of a grain are correlated: the sample is less informative than independent elements would be.
            slack = min(0.01 + 0.05 * share, 0.002 + 0.2 * min(share, 1 - share))
            search.set_window(high, max(1, round((share - slack) * seen)), min(seen, round((share + slack) * seen)))

    def _window(self, number: int, matrix: Matrix, tile: Tile) -> list[tuple[tuple[int, int], Counts]]:
        pattern_counts = []
        rows = tile.scratch.rows(2, matrix.codes, matrix.out_code)
        for i, model in enumerate(matrix.inputs):
            for key, search in self.searches.items():
                if i == 0 or key[0] != model or (number == 3 and not search.missed):
                    continue
                pattern_counts.append((key, count_patterns(matrix, tile, i, [search], NO_FACTORS, rows)[0]))
        return pattern_counts


def _check(product: Product) -> str:
    sizes, limits = product.settings.get("sizes", 0), product.settings.get("wanted", 0)
    if not has_type(sizes, tuple[int, ...]) or not has_type(limits, tuple[tuple[int, float, float], ...]):
        return "its settings are sizes, and wanted: [place, density, gamma] each"
    if len(sizes) != len(product.models) or any(not 0 < size < 1 << 62 for size in sizes):
        return "it needs one size for each model"
    if any(not (0 <= k < len(sizes) and 0 <= density <= 1 and 0 <= gamma <= 1) for k, density, gamma in limits):
        return "its wanted models, densities or gammas are out of range"
    if len(set(product.models)) < len(sizes):
        return "it has a model twice"
    fits = [(out.dtype.name, out.shape) for out in product.outs] == [("I64", (len(limits), 2))]
    return "" if fits else "its array is not [wanted, 2] of int64"


def _serves(product: Product, other: Product) -> bool:
    limits_here, limits_other = (
        {(one.models[k], *limits) for k, *limits in one.settings["wanted"]} for one in (product, other)
    )
    return limits_other <= limits_here


KIND = ProductKind("finding thresholds of the whole model", reduce=Thresholds, check=_check, serves=_serves)
