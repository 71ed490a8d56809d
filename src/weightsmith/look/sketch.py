"""Sketches of a difference: its rows times a sparse matrix of random signs, and what they tell of its singular values.

A sketch Y = D S has few columns, and a row of it needs nothing but the same row of D. So one pass over the tiles of D makes
it, in any order. S is a sparse sign matrix (Martinsson and Tropp 2020, https://arxiv.org/abs/2002.01387, section 9.2). From Y
come an orthonormal basis Q of what the largest singular vectors of D span, and a second pass makes Qᵀ D (Halko, Martinsson and
Tropp 2011, https://arxiv.org/abs/0909.4061).

**Bounds.** The singular values of Qᵀ D are never larger than those of D. In the other direction, the i-th of D is at most the
i-th of Y over the smallest singular value of an i-dimensional part of S, which is above 1 - √(i / width) - 3 / √width but for a
probability of about 1 % (section 8 of the former: Gaussian matrices; sparse signs behave like them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

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
        found, width = self.squares, len(self.squares)
        edge = NOISE_MARGIN * noise / width * (1 + math.sqrt(width / rows)) ** 2
        rank = int((found > max(edge, TINY * float(found[0]))).sum())
        if rank >= min(rows, cols):
            return min(rows, cols)
        if rank > width // 2 and cols > width and (rank == width or GAP**2 * found[rank] > found[rank - 1]):
            return -1
        left = float(found[rank:].sum()) * width / max(1, width - rank)  # the basis of the signal is a part of the sketch too
        return rank if left <= NOISE_MARGIN * noise + 1e-3 * energy else -1


def analyse_sketch(sketch: Floats, cols: int) -> Sketched:
    """See `Sketched`. sketch: float32 [rows, WIDTH or cols], not of zeros. Cost: a Gram matrix of its columns, in float64."""
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
