"""The `differences` product: how far some matrices of one model are from those of another, and in which directions.

It streams: one pass for the sums and the sketches, and one more for the largest singular values, if any matrix differs. Its
steps have two inputs, the two tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from weightsmith._base.idioms import grouped
from weightsmith._features.adapters.factors import rounding_noise
from weightsmith._kernels.codecs import BLOCK, Encoded, EncodedInputs
from weightsmith._kernels.combine import LANES, distance
from weightsmith._kernels.differences import DIFFERENCE_SUMS, Sketch, difference, project
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._plans import Product, Step
from weightsmith._reports.look.models import MatchedTensor
from weightsmith._reports.look.surveys import (
    POWERS,
    Survey,
    Watching,
    added,
    counted,
    decoded,
    differs,
    keep_largest,
    magnitudes,
    sampled,
    survey,
    survey_kind,
    survey_product,
)
from weightsmith.abc.job import Matrix, Tile
from weightsmith.abc.product import Arrays

# ---- Sketches of a difference: its rows times a sparse matrix of random signs, and what they tell of its singular values.
#
# A sketch Y = D S has few columns, and a row of it needs nothing but the same row of D. So one pass over the tiles of D makes
# it, in any order. S is a sparse sign matrix (Martinsson and Tropp 2020, https://arxiv.org/abs/2002.01387, section 9.2). From
# Y come an orthonormal basis Q of what the largest singular vectors of D span, and a second pass makes Qᵀ D (Halko,
# Martinsson and Tropp 2011, https://arxiv.org/abs/0909.4061).
#
# Bounds: the singular values of Qᵀ D are never larger than those of D. In the other direction, the i-th of D is at most the
# i-th of Y over the smallest singular value of an i-dimensional part of S, which is above 1 - √(i / width) - 3 / √width but
# for a probability of about 1% (section 8 of the former: Gaussian matrices; sparse signs behave like them).

WIDTH = 128
"""Columns of a sketch."""

FOLDS = 2
"""Signs in a row of S: two, so that columns of D that meet in one column of Y part in another."""

VALUES = 16
"""Singular values that are estimated."""

TINY = 1e-10
"""Squared singular values below this share of the largest are rounding errors of the sketch."""

NOISE_MARGIN = 2.0
"""What is left of a difference of low rank, as a multiple of the rounding noise that its dtype predicts."""

GAP = 5.0
"""Between the singular values of a signal and those of noise, in a sketch that the signal fills by more than half."""

Floats = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]


@cache
def sparse_signs(cols: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Signs (float32 [folds, cols]) and shifts (int64 [folds, chunks]) of S, for `kernels.differences.fold_row`.

    S depends on the number of columns alone. With at most `WIDTH` columns it is the identity, and the sketch is D.
    """
    chunks = -(-cols // WIDTH)
    if chunks == 1:
        return np.ones((1, cols), np.float32), np.zeros((1, 1), np.int64)
    random = np.random.Generator(np.random.Philox(cols))
    signs = np.where(random.random((FOLDS, cols)) < 0.5, -1, 1) / math.sqrt(FOLDS)
    return signs.astype(np.float32), random.integers(0, WIDTH, (FOLDS, chunks))


@dataclass(frozen=True)
class Sketched:
    """What a sketch tells of a difference D [rows, cols].

    basis    float32 [rows, k], orthonormal: what the largest singular vectors span; k is at most `VALUES`
    upper    float64 [VALUES]: the singular values of D are at most so large; 0 beyond the sides of D
    squares  float64 [WIDTH]: squared singular values of the sketch, descending
    """

    basis: Floats
    upper: Vector
    squares: Vector

    def rank(self, rows: int, cols: int, energy: float, noise: float) -> int:
        """Number of singular values above the rounding noise; -1 if a sketch has no more columns, or if they and the noise do
        not explain the difference. A sketch shrinks the last of many singular values: more than half as many as it has columns
        count only where a gap of a factor `GAP` follows them.

        rows, cols  of D
        energy      its squared norm
        noise       the energy that rounding adds, by the dtype
        """
        squares, width = self.squares, len(self.squares)
        edge = NOISE_MARGIN * noise / width * (1 + math.sqrt(width / rows)) ** 2
        rank = int((squares > max(edge, TINY * float(squares[0]))).sum())
        if rank >= min(rows, cols):
            return min(rows, cols)
        if rank > width // 2 and cols > width and (rank == width or GAP**2 * squares[rank] > squares[rank - 1]):
            return -1
        rest = float(squares[rank:].sum()) * width / max(1, width - rank)  # the basis of the signal is a part of the sketch too
        return rank if rest <= NOISE_MARGIN * noise + 1e-3 * energy else -1


def analyse_sketch(sketch: Floats, cols: int) -> Sketched:
    """What a sketch tells of its matrix. sketch: float32 [rows, WIDTH or cols], not of zeros.

    Cost: a Gram matrix of its columns, in float64.
    """
    rows, width = sketch.shape
    wide = sketch.astype(np.float64)
    squares, vectors = np.linalg.eigh(wide.T @ wide)
    squares, vectors = np.maximum(squares[::-1], 0), vectors[:, ::-1]
    k = min(VALUES, rows, int((squares > TINY * squares[0]).sum()))
    basis = wide @ (vectors[:, :k] / np.sqrt(squares[:k]))
    upper = np.zeros(VALUES)
    i = np.arange(1, min(VALUES, rows, width) + 1)
    slack = 1 - np.sqrt(i / width) - 3 / math.sqrt(width) if cols > width else 1.0
    upper[: len(i)] = np.sqrt(squares[: len(i)]) / slack
    return Sketched(basis.astype(np.float32), upper, squares)


OP = "differences"

MOVED = 16
"""Rows of an embedding that are listed: those that moved most."""

SKETCH_BYTES = 32 << 20
"""Bytes of the sketches that are held at once: matrices are shared out among products of this size."""

SUMS = DIFFERENCE_SUMS + 3
"""Columns of the product's sums: those of `kernels.differences`, the noise of an element, Σ b², Σ a·b."""

_CANCELLED = 1e-6
"""A grain whose Σ b² is below this share of Σ a² is looked at again: from the other sums it would have lost its digits."""

_NO_SKETCH = np.empty((0, 0), np.float32)
_NO_SIGNS = np.empty((0, 0), np.float32), np.empty((0, 0), np.int64)


def differences(name: str, steps: Sequence[Step]) -> Product:
    """The product. steps: each with two inputs; spectra are made of the weights of linear layers.

    Its arrays have a row for each step: `sums` float64 [steps, SUMS],
    `nonfinite` float64 [steps, 2, 2] (of each input, how many elements are NaN, and infinite), `values` and `upper` float64
    [steps, VALUES], `rank` float64 [steps] (see `Sketched.rank`; nan: unknown), `moved` float64 [steps, MOVED, 2] (row number,
    and its squared distance over its squared norm: infinite if that is zero, -1 or 0 where there is no row), `magnitudes`
    int64 [steps, POWERS] (of a sample of the delta's elements that are not zero). What differs is counted with NaN equal to
    NaN, and an infinity to itself; other sums of a step with such elements are not numbers.
    """
    shapes: dict[str, tuple[int, ...]] = {"sums": (SUMS,), "nonfinite": (2, 2), "values": (VALUES,), "upper": (VALUES,)}
    shapes |= {"rank": (), "moved": (MOVED, 2), "magnitudes": (POWERS,)}
    return survey_product(name, OP, steps, shapes, integers=("magnitudes",))


@dataclass(slots=True)
class _TileDifferences:
    """What one tile tells in the first pass. moved: float64 [rows, 2] of a vocabulary, row distance and norm, squared."""

    name: str
    start: int
    sums: npt.NDArray[np.float64]
    noise: float
    sketch: Floats
    moved: npt.NDArray[np.float64] | None
    nonfinite: npt.NDArray[np.int64] | None = None
    magnitudes: npt.NDArray[np.int64] | None = None


@dataclass(slots=True)
class _Projected:
    name: str
    product: Floats


class Differences(Survey):
    """The sums of `differences`, tile by tile; a second pass over tensors with a sketch."""

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        self._sums, self._nonfinite, self._values, self._upper, self._rank, self._moved, self._magnitudes = self.totals
        self._rank.fill(np.nan)
        self._noises: list[list[float]] = [[] for _ in self.specs]
        self._sketches: dict[str, Floats] = {}
        self._bases: dict[str, Floats] = {}
        self._products: dict[str, npt.NDArray[np.float64]] = {}

    def passes(self) -> int:
        return 2 if self._bases or self._products else 1

    def statistics(self, number: int, matrix: Matrix, tile: Tile) -> _TileDifferences | _Projected | None:
        if number == 0:
            return self._compare(matrix, tile)
        basis = self._bases.get(matrix.name)
        if basis is None:
            return None
        first, count = tile.start // matrix.cols, tile.size // matrix.cols
        projected = np.zeros((basis.shape[1], matrix.cols), np.float32)
        rows = tile.scratch.rows(5, matrix.codes, matrix.out_code, matrix.cols)
        project(tile.raw, matrix.codes, count, matrix.cols, basis[first : first + count], projected, rows)
        return _Projected(matrix.name, projected)

    def _compare(self, matrix: Matrix, tile: Tile) -> _TileDifferences:
        grains, sums = tile.grains(matrix.grain), np.zeros(DIFFERENCE_SUMS + 2)
        if (matrix.codes < 0).any():
            nbytes = tile.size * self.specs[self.row[matrix.name]].dtype.itemsize
            changed = np.not_equal(tile.raw[0, :nbytes], tile.raw[1, :nbytes]).reshape(tile.size, -1).any(1)
            sums[3] = changed.sum()
            return _TileDifferences(matrix.name, tile.start, sums[None], 0.0, _NO_SKETCH, None)
        sketched = matrix.name in self.linear
        row = matrix.cols if sketched else BLOCK
        signs, shifts = sparse_signs(matrix.cols) if sketched else _NO_SIGNS
        sketch = np.zeros((tile.size // row, min(WIDTH, matrix.cols)), np.float32) if sketched else _NO_SKETCH
        rows = tile.scratch.rows(2, matrix.codes, matrix.out_code, row)
        grain_sums = np.empty((grains, DIFFERENCE_SUMS))
        lanes = np.empty((3, LANES))
        folded = Sketch(signs, shifts, sketch)
        difference(EncodedInputs(tile.raw, matrix.codes), tile.size, row, matrix.grain, grain_sums, folded, rows, lanes)
        with np.errstate(invalid="ignore"):
            products = np.stack(
                [grain_sums[:, 0] + 2 * grain_sums[:, 1] + grain_sums[:, 2], grain_sums[:, 0] + grain_sums[:, 1]], axis=1
            )
        nonfinite, finite = None, np.isfinite(grain_sums[:, :3]).all()
        if not finite or (products[:, 0] < _CANCELLED * grain_sums[:, 0]).any():
            (a, b), starts = decoded(matrix, tile), np.arange(0, tile.size, matrix.grain)
            if not finite:
                nonfinite = counted(np.stack([a, b]))
                grain_sums[:, 3] = np.add.reduceat(differs(a, b), starts, dtype=np.int64)
            with np.errstate(invalid="ignore", over="ignore"):
                wide = b.astype(np.float64)
                products = np.stack([np.add.reduceat(wide * factor, starts) for factor in (wide, a)], axis=1)
        sample = sampled(matrix, tile, 1)
        with np.errstate(invalid="ignore", over="ignore"):
            powers = magnitudes(sample - sampled(matrix, tile, 0))
        moved = self._rows_moved(matrix, tile) if matrix.role == "vocabulary" and grain_sums[:, 3].any() else None
        noise = rounding_noise(sample[np.isfinite(sample)])
        return _TileDifferences(
            matrix.name, tile.start, np.hstack([grain_sums, products]), noise, sketch, moved, nonfinite, powers
        )

    @staticmethod
    def _rows_moved(matrix: Matrix, tile: Tile) -> npt.NDArray[np.float64]:
        count = tile.size // matrix.cols
        squares = np.empty((count, 2))
        rows, sums = tile.scratch.rows(2, matrix.codes, matrix.out_code), tile.scratch.sums(2)
        a, b = matrix.codes.tolist()
        distance(Encoded(tile.raw[0], a), Encoded(tile.raw[1], b), tile.size, matrix.cols, squares, rows, sums)
        return squares

    def take(self, number: int, result: _TileDifferences | _Projected | None) -> None:
        if isinstance(result, _TileDifferences):
            self._take_part(result)
        elif isinstance(result, _Projected):
            held = self._products.setdefault(result.name, np.zeros(result.product.shape))
            held += result.product

    def _take_part(self, part: _TileDifferences) -> None:
        i = self.row[part.name]
        sums, columns = self._sums[i], [0, 1, 2, 3, DIFFERENCE_SUMS + 1, DIFFERENCE_SUMS + 2]
        sums[columns] = added(sums[columns], part.sums[:, [0, 1, 2, 3, 5, 6]])
        sums[4] = max(sums[4], float(part.sums[:, 4].max(initial=0)))
        self._noises[i].append(part.noise)
        if part.nonfinite is not None:
            self._nonfinite[i] += part.nonfinite
        if part.magnitudes is not None:
            self._magnitudes[i] += part.magnitudes
        if part.sketch.size:
            rows, cols = self.specs[i].shape
            held = self._sketches.setdefault(part.name, np.zeros((rows, part.sketch.shape[1]), np.float32))
            first = part.start // cols
            held[first : first + len(part.sketch)] = part.sketch
        if part.moved is not None:
            moved, norms = part.moved.T
            with np.errstate(divide="ignore", invalid="ignore"):  # infinite: the row was zero
                shares = np.where(np.isfinite(moved) & np.isfinite(norms) & (moved > 0), moved / norms, -1)
            held = self._moved[i]
            if not held.any():  # few steps have rows: the memory of the others is never touched
                held.fill(-1)
            keep_largest(held, part.start // self.specs[i].shape[1], shares)

    def end(self, number: int) -> None:
        if number == 0:
            for i, noises in enumerate(self._noises):
                self._sums[i, DIFFERENCE_SUMS] = float(np.mean(noises)) if noises else 0.0
            for name in list(self._sketches):
                self._analyse(name, self._sketches.pop(name))
        else:
            for name, product in self._products.items():
                i = self.row[name]
                if not np.isfinite(product).all():  # as in _analyse
                    self._upper[i], self._rank[i] = 0, np.nan
                    continue
                values = np.sqrt(np.maximum(np.linalg.eigvalsh(product @ product.T)[::-1], 0))
                self._values[i, : len(values)] = values
            self._bases.clear()

    def _analyse(self, name: str, sketch: Floats) -> None:
        i = self.row[name]
        energy, noise = float(self._sums[i, 2]), float(self._sums[i, DIFFERENCE_SUMS])
        # Numbers near the largest of float32 are no fine-tune's; their sums overflow.
        if energy == 0 or not np.isfinite(energy) or not np.isfinite(sketch).all():
            self._rank[i] = 0 if energy == 0 else np.nan
            return
        rows, cols = self.specs[i].shape
        sketched = analyse_sketch(sketch, cols)
        self._upper[i], self._bases[name] = sketched.upper, sketched.basis
        self._rank[i] = sketched.rank(rows, cols, energy, noise * rows * cols)


def measured(
    what: str,
    product: Callable[[str, Sequence[Step]], Product],
    matrices: Sequence[MatchedTensor],
    models: Sequence[Checkpoint],
    *,
    threads: int | None,
    progress: Watching,
    passes: int = 1,
) -> Iterator[tuple[MatchedTensor, Arrays]]:
    """Each matrix with its own row of the arrays of a product, which is computed layer by layer, in memory.

    The arrays of a layer are let go of with its last matrix: a model may have 70,000.
    """
    products = [product(f"{what} of {name}", steps) for name, steps in _batches([(m.place.group, m.step) for m in matrices])]
    if not products:
        return
    outcome = survey("diff", models, products, threads=threads, progress=progress, doing="comparing", passes=passes)
    results = outcome.results
    places = {step.out.name: (streamed, i) for streamed in products for i, step in enumerate(streamed.steps)}
    waiting = {streamed.name: len(streamed.steps) for streamed in products}
    for matched in matrices:
        streamed, i = places.pop(matched.step.out.name)
        yield matched, [array[i] for array in results.arrays(streamed.name)]
        waiting[streamed.name] -= 1
        if not waiting[streamed.name]:
            results.drop(streamed)


def _batches(steps: Sequence[tuple[str, Step]]) -> Iterator[tuple[str, list[Step]]]:
    """Steps by a name (their layer), in order, in batches whose sketches take at most `SKETCH_BYTES`, or of one step.

    A step has a sketch for each input but the first.
    """
    for name, members in grouped(steps).items():
        batch: list[Step] = []
        held, number = 0, 0
        for step in members:
            nbytes = 4 * WIDTH * step.out.shape[0] * (len(step.inputs) - 1) if step.role == "linear" else 0
            if batch and held + nbytes > SKETCH_BYTES:
                yield f"{name} ({number})", batch
                batch, held, number = [], 0, number + 1
            batch.append(step)
            held += nbytes
        yield (f"{name} ({number})" if number else name), batch


def _problem(steps: Sequence[Step]) -> str:
    if any(len(step.inputs) != 2 or not step.out.size for step in steps) or not steps:
        return "its steps do not have two inputs each"
    flat = any(step.role != "other" and len(step.out.shape) != 2 for step in steps)
    return "a matrix of it has not two dimensions" if flat else ""


KIND = survey_kind("comparing", Differences, differences, _problem)
