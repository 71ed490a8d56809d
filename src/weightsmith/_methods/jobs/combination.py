"""Linear combinations of the inputs, with given coefficients or with a function of the Gram matrix: of whole tensors, rows or
columns.

slerp, karcher, model_stock and similar methods compute Σ cᵢ xᵢ, where the cᵢ depend only on the inputs' inner products: one
statistics pass, a small float64 function from the Gram matrix to coefficients, one linear pass.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._kernels.codecs import Encoded, EncodedInputs, encode
from weightsmith._kernels.combine import LANES, combine, combine_columns, combine_rows, copy_rows, gram, gram_columns, gram_rows
from weightsmith._methods.jobs.matrix import write_with
from weightsmith.abc.job import Bytes, Job, Matrix, Tile

# ---- Means of directions, computed from the angles between them


Vector = npt.NDArray[np.float64]


def unit_vectors(gram: Vector) -> tuple[Vector, Vector]:
    """Norms [k] of the vectors, and cosines [k, k] between them. A zero vector has cosine 0, even with itself."""
    norms = np.sqrt(np.diagonal(gram))
    inverse = np.where(norms > 0, 1.0 / np.where(norms > 0, norms, 1.0), 0.0)
    return norms, np.clip(gram * inverse * inverse[:, None], -1.0, 1.0)


def length(cosines: Vector, coefficients: Vector) -> float:
    """The length of a combination of the unit vectors."""
    square = float((coefficients * (cosines * coefficients).sum(axis=1)).sum())
    return math.sqrt(max(square, 0.0))


def mean_direction(cosines: Vector, weights: Vector, least: float) -> Vector | None:
    """The direction of Σ wᵢ uᵢ; None if its length is at most `least`, or NaN."""
    size = length(cosines, weights)
    return weights / size if size > least else None


def karcher_steps(cosines: Vector, shares: Vector, direction: Vector, steps: int, tol: float) -> Vector:
    """At most `steps` iterations u ← exp_u(Σ shareᵢ log_u(uᵢ)) from `direction` u to the Karcher mean of the unit vectors.

    Stops before a step of length `tol` or less. A vector opposite to u has no unique shortest path and is ignored.

    Nearly parallel vectors are safe: coefficients depend on an angle only through θ / sin θ = 1 + θ²/6 + …, so they are as
    accurate as the cosines. Only the length of a step, used as stopping criterion, loses digits (1e-8 remain).
    """
    for _ in range(steps):
        along = np.clip((cosines * direction).sum(axis=1), -1.0, 1.0)
        pulls = shares * np.array([angle_over_sine(float(c)) for c in along])
        step = pulls - (pulls * along).sum() * direction
        size = length(cosines, step)
        if size <= tol:
            break
        direction = math.cos(size) * direction + (math.sin(size) / size) * step
        direction = direction / length(cosines, direction)
    return direction


def angle_over_sine(cosine: float) -> float:
    """θ / sin θ for cos θ = cosine: 1 at θ = 0, and 0 where it grows without bound, at θ = π."""
    if cosine < -1.0 + 1e-12:
        return 0.0
    theta = math.acos(cosine)
    return theta / math.sin(theta) if theta > 0 else 1.0


Solve = Callable[[Vector], Vector]
"""Gram matrix, float64 [k, k] → coefficients, float64 [inputs]; of rows and columns [vectors, k, k] → [vectors, inputs]."""

AT_ONCE = 1 << 17
"""Maximum number of Gram matrix elements of rows in memory, 1 MiB, for any width of rows and number of models."""


def symmetric(products: Vector, k: int) -> Vector:
    """Gram matrices [..., k, k] from products [..., pairs], pairs (i, j) with i <= j in row order.

    >>> symmetric(np.array([1.0, 2.0, 3.0]), 2)
    array([[1., 2.],
           [2., 3.]])
    """
    gram = np.empty((*products.shape[:-1], k, k))
    i, j = np.triu_indices(k)
    gram[..., i, j] = products
    gram[..., j, i] = products
    return gram


class CombinationJob(Job):
    """Σ coefficients[i] · input[i], with given coefficients (float64 [inputs])."""

    def __init__(self, matrix: Matrix, coefficients: Vector) -> None:
        super().__init__(matrix)
        self.coefficients = np.asarray(coefficients, np.float64)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        rows = tile.scratch.rows(1, m.codes, m.out_code)
        combine(tile.raw, m.codes, self.coefficients, tile.size, out, m.out_code, rows, tile.scratch.sums(1))


def sum_of_deltas(matrix: Matrix, shares: Vector) -> CombinationJob:
    """base + Σ shares[i] · (input i - base)."""
    return CombinationJob(matrix, np.concatenate([[1.0 - shares.sum()], shares]))


class GramJob(CombinationJob):
    """Coefficients from inner products.

    With `deltas`, the vectors are the inputs minus the first one, the base, and k = inputs - 1.
    """

    def __init__(self, matrix: Matrix, solve: Solve, *, deltas: bool = False) -> None:
        super().__init__(matrix, np.zeros(len(matrix.codes)))
        self.solve = solve
        self.deltas = deltas
        self.vectors = len(matrix.codes) - deltas

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> Vector:
        m = self.matrix
        pairs = self.vectors * (self.vectors + 1) // 2
        out = np.empty((tile.grains(m.grain), pairs))
        rows = tile.scratch.rows(len(m.codes), m.codes, m.out_code)
        gram(tile.raw, m.codes, tile.size, m.grain, self.deltas, out, rows, np.empty((pairs, LANES)))
        return out

    def finish_pass(self, number: int, results: list[Any]) -> None:
        # cumsum adds sequentially; sum would add pairwise, in an order that depends on the tiles.
        totals = np.zeros(self.vectors * (self.vectors + 1) // 2)
        for result in results:
            totals = np.cumsum(np.concatenate([totals[None], result]), axis=0)[-1]
        with np.errstate(all="ignore"):  # NaN and infinity are reported by the tiles, or allowed
            self.coefficients = self.solve(symmetric(totals, self.vectors))


class RowJob(Job):
    """Separate coefficients for each row, computed and used within a tile, in one pass.

    deltas  the vectors are the inputs minus the first one, the base
    """

    def __init__(self, matrix: Matrix, solve: Solve, *, deltas: bool) -> None:
        super().__init__(matrix)
        self.solve = solve
        self.deltas = deltas

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        k = len(m.codes) - self.deltas
        pairs, height = k * (k + 1) // 2, max(1, AT_ONCE // (k * k))
        rows, sums = tile.scratch.rows(len(m.codes), m.codes, m.out_code), tile.scratch.sums(1)
        lanes = np.empty((pairs, LANES))
        end = tile.size // m.cols
        for first in range(0, end, height):
            products = np.empty((min(height, end - first), pairs))
            gram_rows(tile.raw, m.codes, first, m.cols, self.deltas, products, rows, lanes)
            with np.errstate(all="ignore"):
                coefficients = np.ascontiguousarray(self.solve(symmetric(products, k)))
            combine_rows(EncodedInputs(tile.raw, m.codes), coefficients, first, m.cols, Encoded(out, m.out_code), rows, sums)


class ColumnJob(Job):
    """Separate coefficients for each column. A first pass sums the products along the columns, row by row.

    deltas  the vectors are the inputs minus the first one, the base
    """

    # Sequential, because sums in varying tile order would round differently from run to run.
    sequential = True

    def __init__(self, matrix: Matrix, solve: Solve, *, deltas: bool) -> None:
        super().__init__(matrix)
        self.solve = solve
        self.deltas = deltas
        self.vectors = len(matrix.codes) - deltas
        self.totals = np.zeros((self.vectors * (self.vectors + 1) // 2, matrix.cols))
        self.coefficients = np.zeros((len(matrix.codes), matrix.cols))

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> None:
        m = self.matrix
        rows = tile.scratch.rows(len(m.codes), m.codes, m.out_code)
        gram_columns(tile.raw, m.codes, tile.size, m.cols, self.deltas, self.totals, rows)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        with np.errstate(all="ignore"):
            coefficients = self.solve(symmetric(np.ascontiguousarray(self.totals.T), self.vectors))
        self.coefficients = np.ascontiguousarray(coefficients.T)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        rows, sums = tile.scratch.rows(1, m.codes, m.out_code), tile.scratch.sums(1)
        inputs, encoded = EncodedInputs(tile.raw, m.codes), Encoded(out, m.out_code)
        combine_columns(inputs, self.coefficients, tile.size, m.cols, encoded, rows, sums)


class OuterColumnJob(Job):
    """base + (1 - share) · (model - base), with a share of the base for each column.

    shares  Gram matrices of the two inputs, float64 [columns, 2, 2] → float64 [columns]

    A column is all elements with the same position in all dimensions but the first: of a convolution [outputs, inputs, 3, 3]
    there are 9 · inputs. Products are sums along it, in float64.
    """

    sequential = True  # as in ColumnJob

    def __init__(self, matrix: Matrix, shares: Solve) -> None:
        super().__init__(matrix)
        self._shares = shares
        self._columns = matrix.size // matrix.shape[0] if matrix.size and matrix.shape else 1
        self._totals = np.zeros((3, self._columns))
        self._rest = np.zeros(self._columns)
        self.resident_bytes = 8 * 4 * self._columns

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> None:
        base, other = self._values(tile, deltas=False).astype(np.float64)
        with np.errstate(all="ignore"):
            products = np.stack([base * base, base * other, other * other])
        at = 0
        while at < tile.size:
            column = (tile.start + at) % self._columns
            rows = 1 if column else max(1, (tile.size - at) // self._columns)
            width = min(self._columns - column, tile.size - at)
            part = products[:, at : at + rows * width].reshape(3, rows, width)
            totals = self._totals[:, None, column : column + width]
            # cumsum adds row after row, whatever the tiles
            self._totals[:, column : column + width] = np.cumsum(np.concatenate([totals, part], axis=1), axis=1)[:, -1]
            at += rows * width

    def finish_pass(self, number: int, results: list[Any]) -> None:
        with np.errstate(all="ignore"):  # NaN and infinity are reported by the tiles, or allowed
            self._rest = 1.0 - self._shares(symmetric(np.ascontiguousarray(self._totals.T), 2))

    def _values(self, tile: Tile, *, deltas: bool) -> npt.NDArray[Any]:
        m = self.matrix
        rows = tile.scratch.rows(1, m.codes, m.out_code)
        values = np.empty((2 - deltas, tile.size), rows.dtype)
        copy_rows(tile.raw, m.codes, tile.size, 0, deltas, values, rows)
        return values

    def apply(self, tile: Tile, out: Bytes) -> None:
        delta = self._values(tile, deltas=True)[0]
        rest = self._rest[(tile.start + np.arange(tile.size)) % self._columns]
        with np.errstate(all="ignore"):
            write_with(self.matrix, tile, out, np.ones(1), rest * delta)


class SplicedJob(Job):
    """The positions first … end - 1 of a dimension from the second input, and all others from the first.

    along   the dimension
    inside  the run is the second input's; else all but the run is
    """

    def __init__(self, matrix: Matrix, along: int, first: int, end: int, *, inside: bool) -> None:
        super().__init__(matrix)
        self._inner = math.prod(matrix.shape[along + 1 :])
        self._length = matrix.shape[along] if matrix.shape else 1
        self._first, self._end, self._inside = first, end, inside

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        rows = tile.scratch.rows(1, m.codes, m.out_code)
        values = np.empty((2, tile.size), rows.dtype)
        copy_rows(tile.raw, m.codes, tile.size, 0, False, values, rows)
        places = (tile.start + np.arange(tile.size)) // self._inner % self._length
        second = ((places >= self._first) & (places < self._end)) == self._inside
        encode(np.where(second, values[1], values[0]), tile.size, m.out_code, 0, out)


class ChangedDeltaJob(Job):
    """An input + factor · change(delta between two inputs), of the whole matrix.

    change  the delta, float64, with the shape of the matrix → the same. Its own work takes seven arrays of that size at most
    start   the input that the result is added to
    ends    two inputs: the delta is the second minus the first
    order   an input that change gets as its second argument, float64 of the same shape; None: it takes one
    """

    def __init__(
        self,
        matrix: Matrix,
        change: Callable[..., Vector],
        factor: float,
        *,
        start: int,
        ends: tuple[int, int],
        order: int | None = None,
    ) -> None:
        super().__init__(matrix)
        self._change, self._factor, self._ends = change, factor, list(ends)
        self._order = [] if order is None else [order]
        self._coefficients = np.eye(len(matrix.codes))[start]
        self._held: list[npt.NDArray[Any]] = []
        self._update = np.empty(0)
        self._lock = threading.Lock()
        self.resident_bytes = 8 * 9 * matrix.size

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> None:
        m, rows = self.matrix, tile.scratch.rows(1, self.matrix.codes, self.matrix.out_code)
        read = [self._ends, self._order] if self._order else [self._ends]
        with self._lock:
            if not self._held:
                self._held = [np.empty((1, m.size), rows.dtype) for _ in read]
        for inputs, held in zip(read, self._held, strict=True):
            raw, codes = np.ascontiguousarray(tile.raw[inputs]), m.codes[inputs]
            copy_rows(raw, codes, tile.size, tile.start, len(inputs) == 2, held, rows)

    def finish_pass(self, number: int, results: list[Any]) -> None:
        whole = [held.astype(np.float64).reshape(self.matrix.shape) for held in self._held]
        self._held = []
        with np.errstate(all="ignore"):  # NaN and infinity are reported by the tiles, or allowed
            self._update = (self._factor * self._change(*whole)).reshape(-1)

    def apply(self, tile: Tile, out: Bytes) -> None:
        write_with(self.matrix, tile, out, self._coefficients, self._update[tile.start : tile.start + tile.size])


class SpectralDeltaJob(ChangedDeltaJob):
    """A `ChangedDeltaJob` whose change takes Fourier transforms, which other processors may round differently."""

    portable = False


# ---- Means of the deltas, in which each element of each model has a share of its own


class SharesJob(Job):
    """base + factor · Σ wᵢ sᵢ δᵢ / Σ sᵢ, element by element; the mean of wᵢδᵢ where all shares are 0.

    shares  float32 [rows, cols] of each delta, not negative; may be mapped from a file
    weight  wᵢ, one for each delta
    floor   the least share, of the mean of all shares

    Computed in float64.
    """

    def __init__(
        self, matrix: Matrix, shares: Sequence[npt.NDArray[Any]], weight: Sequence[float], floor: float, factor: float
    ) -> None:
        super().__init__(matrix)
        self._shares = [share.reshape(-1) for share in shares]
        self._weight = np.asarray(weight, np.float64)
        self._floor, self._factor = floor, factor
        self._least = 0.0
        self._base = np.array([1.0] + [0.0] * len(shares))

    def passes(self) -> int:
        return 1

    def statistics(self, number: int, tile: Tile) -> list[float]:
        """The sums of the shares of each grain."""
        m, end = self.matrix, tile.start + tile.size
        starts = range(tile.start, end, m.grain)
        return [float(share[a : min(a + m.grain, end)].sum(dtype=np.float64)) for a in starts for share in self._shares]

    def finish_pass(self, number: int, results: list[Any]) -> None:
        total = np.cumsum(np.concatenate(results))[-1]  # adds sequentially
        self._least = self._floor * float(total) / (len(self._shares) * self.matrix.size)

    def apply(self, tile: Tile, out: Bytes) -> None:
        m = self.matrix
        rows = tile.scratch.rows(1, m.codes, m.out_code)
        deltas = np.empty((len(self._shares), tile.size), rows.dtype)
        copy_rows(tile.raw, m.codes, tile.size, 0, True, deltas, rows)
        update, mean, total = np.zeros(tile.size), np.zeros(tile.size), np.zeros(tile.size)
        with np.errstate(all="ignore"):  # NaN and infinity are reported by the tiles, or allowed
            for share, weight, delta in zip(self._shares, self._weight, deltas, strict=True):
                least_share = np.maximum(share[tile.start : tile.start + tile.size], self._least, dtype=np.float64)
                total += least_share
                update += (weight * least_share) * delta
                mean += weight * delta
            update = self._factor * np.where(total > 0, update / total, mean / len(deltas))
        write_with(m, tile, out, self._base, update)
