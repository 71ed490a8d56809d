"""The `alignments` product: how the task vectors of several models lie to each other.

It streams: a first pass samples magnitudes, to find what the largest elements are; a second makes inner products, counts and
sketches. Its steps have the base as their first input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith.jobs.job import Matrix, Tile
from weightsmith.kernels.agreement import agreement, sketch_deltas
from weightsmith.kernels.codecs import BLOCK
from weightsmith.kernels.combine import LANES, gram
from weightsmith.kernels.select import HIGH_BINS, Scores, count_high, find_bin
from weightsmith.look.nonfinite import counted, decoded
from weightsmith.look.sketch import WIDTH, Floats, analyse_sketch, sparse_signs
from weightsmith.plans import Product, Step
from weightsmith.products.base import Arrays, ProductKind, StreamingReduction
from weightsmith.tensors import DTYPES, TensorSpec

OP = "alignments"

LARGE_SHARE = 0.01
"""Of the elements of a delta that count as its largest."""

DIRECTIONS = 8
"""Leading singular vectors whose span is compared."""

_NO_FACTORS = np.zeros(0)

Count = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]


def alignments(name: str, steps: Sequence[Step]) -> Product:
    """The product. steps: each with the base and k models, of floating numbers; subspaces are of the weights of linear layers.

    Its arrays have a row for each step: `products` float64 [steps, pairs] (inner products of the deltas, pairs (i, j) with
    i <= j in row order), `counts` int64 [steps, 2 + pairs] (see `kernels.agreement`), `cosines` float64 [steps, pairs,
    DIRECTIONS] (of the principal angles, descending; nan where there are fewer), `nonfinite` int64 [steps, 1 + k, 2] (of each
    input, how many elements are NaN, and infinite).
    """
    n, k = len(steps), len(steps[0].inputs) - 1 if steps else 0
    pairs = k * (k + 1) // 2
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "products": ("F64", (n, pairs)),
        "counts": ("I64", (n, 2 + pairs)),
        "cosines": ("F64", (n, pairs, DIRECTIONS)),
        "nonfinite": ("I64", (n, 1 + k, 2)),
    }
    outs = tuple(TensorSpec(f"{name}: {what}", DTYPES[dtype], shape) for what, (dtype, shape) in shapes.items())
    return Product(name, OP, outs, {}, tuple(steps))


@dataclass(slots=True)
class _Sampled:
    name: str
    bins: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.uint32]]]


@dataclass(slots=True)
class _Part:
    name: str
    first_row: int
    products: Sums
    counts: Count
    nonfinite: Count | None
    sketch: Floats | None


class Alignments(StreamingReduction):
    """See `alignments`."""

    def __init__(self, product: Product) -> None:
        self._steps = {step.out.name: i for i, step in enumerate(product.steps)}
        self._specs = [step.out for step in product.steps]
        self._sketched = {step.out.name for step in product.steps if step.role == "linear"}
        n, self._k = len(product.steps), len(product.steps[0].inputs) - 1 if product.steps else 0
        pairs = self._k * (self._k + 1) // 2
        self._products, self._counts = np.zeros((n, pairs)), np.zeros((n, 2 + pairs), np.int64)
        self._nonfinite = np.zeros((n, 1 + self._k, 2), np.int64)
        self._cosines = np.full((n, pairs, DIRECTIONS), np.nan)
        self._bins: dict[str, Count] = {}
        self._limits = np.zeros((n, self._k), np.uint32)
        self._sketches: dict[str, Floats] = {}

    def passes(self) -> int:
        return 2

    def sampled(self, number: int) -> bool:
        return number == 0

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> _Sampled | _Part:
        return self._sample(matrix, tile) if number == 0 else self._compare(matrix, tile)

    def _sample(self, matrix: Matrix, tile: Tile) -> _Sampled:
        scratch, found = tile.scratch, []
        rows = scratch.rows(2, matrix.codes, matrix.out_code)
        for i in range(1, 1 + self._k):
            counts = scratch.counts(HIGH_BINS)
            scores = Scores(tile.raw, matrix.codes, i, _NO_FACTORS, matrix.cols, rows, scratch.bits)
            count_high(scores, tile.size, counts)
            used = np.flatnonzero(counts)
            found.append((used, counts[used]))
        return _Sampled(matrix.name, found)

    def _compare(self, matrix: Matrix, tile: Tile) -> _Part:
        i, pairs = self._steps[matrix.name], self._products.shape[1]
        products, counts = np.empty((tile.grains(matrix.grain), pairs)), np.zeros(2 + pairs, np.int64)
        rows = tile.scratch.rows(1 + self._k, matrix.codes, matrix.out_code, matrix.cols)
        gram(tile.raw, matrix.codes, tile.size, matrix.grain, True, products, rows, np.empty((pairs, LANES)))
        nonfinite = None if np.isfinite(products).all() else counted(decoded(matrix, tile))
        marks = np.empty((3 + self._k, BLOCK), np.uint8)
        agreement(tile.raw, matrix.codes, tile.size, self._limits[i], counts, rows, marks)
        if matrix.name not in self._sketched:
            return _Part(matrix.name, 0, products, counts, nonfinite, None)
        signs, shifts = sparse_signs(matrix.cols)
        count = tile.size // matrix.cols
        sketch = np.zeros((self._k, count, min(WIDTH, matrix.cols)), np.float32)
        sketch_deltas(tile.raw, matrix.codes, count, matrix.cols, signs, shifts, sketch, rows)
        return _Part(matrix.name, tile.start // matrix.cols, products, counts, nonfinite, sketch)

    def take(self, number: int, result: _Sampled | _Part) -> None:
        if isinstance(result, _Sampled):
            held = self._bins.setdefault(result.name, np.zeros((self._k, HIGH_BINS), np.int64))
            for own, (used, counts) in zip(held, result.bins, strict=True):
                own[used] += counts
            return
        i = self._steps[result.name]
        # cumsum adds grain after grain; sum would add in an order that depends on the tiles.
        with np.errstate(invalid="ignore"):
            self._products[i] = np.cumsum(np.concatenate([self._products[i][None], result.products]), axis=0)[-1]
        if result.nonfinite is not None:
            self._nonfinite[i] += result.nonfinite
        self._counts[i] += result.counts
        if result.sketch is not None:
            shape = self._k, self._specs[i].shape[0], result.sketch.shape[2]
            held_sketch = self._sketches.setdefault(result.name, np.zeros(shape, np.float32))
            held_sketch[:, result.first_row : result.first_row + result.sketch.shape[1]] = result.sketch

    def end(self, number: int) -> None:
        if number == 0:
            for name, bins in self._bins.items():
                for i, own in enumerate(bins):
                    rank = max(1, round(LARGE_SHARE * int(own.sum())))
                    self._limits[self._steps[name], i] = int(find_bin(own, rank)[0]) << 16
            self._bins.clear()
            return
        for name in list(self._sketches):
            self._compare_directions(self._steps[name], self._sketches.pop(name))

    def _compare_directions(self, i: int, sketches: Floats) -> None:
        cols = self._specs[i].shape[1]
        bases = [analyse_sketch(s, cols).basis[:, :DIRECTIONS] if np.isfinite(s).all() and s.any() else None for s in sketches]
        at = 0
        for a in range(self._k):
            for b in range(a, self._k):
                p, q = bases[a], bases[b]
                if p is not None and q is not None:
                    found = np.minimum(1, np.linalg.svd(p.astype(np.float64).T @ q.astype(np.float64), compute_uv=False))
                    self._cosines[i, at, : len(found)] = found
                at += 1

    def arrays(self) -> Arrays:
        return [self._products, self._counts, self._cosines, self._nonfinite]


def _check(product: Product) -> str:
    counts = {len(step.inputs) for step in product.steps}
    if len(counts) != 1 or min(counts) < 3 or any(not step.out.size for step in product.steps):
        return "its steps do not have a base and the same number of models, two or more"
    if any(step.role == "linear" and len(step.out.shape) != 2 for step in product.steps):
        return "a matrix of it has not two dimensions"
    return "" if product.outs == alignments(product.name, product.steps).outs else "its arrays are not those of its steps"


KIND = ProductKind("comparing", reduce=Alignments, check=_check)
