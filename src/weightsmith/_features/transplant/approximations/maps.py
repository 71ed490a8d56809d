"""Linear maps from the donor's rows to the model's: principal components rotated onto each other (landmark_pca), or a ridge
regression that the nearest shared tokens correct (hybrid), which takes the pieces of a token where they are nearer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._features.transplant.approximations.averages import compose, piece_weights
from weightsmith._features.transplant.approximations.pursuit import Sparse, in_parallel, relative
from weightsmith.abc.approximation import Approximated, Approximation, Floats, Problem

Tensor = Any  # torch is optional, so mypy cannot use its type


def _rotated_rows(problem: Problem) -> Approximated:
    """The rotation and its scale are the orthogonal Procrustes solution for the shared tokens."""
    import torch

    targets, atoms, values = (_wide(rows, problem) for rows in (problem.targets(), problem.atoms(), problem.values()))
    centre, middle = atoms.mean(0), values.mean(0)
    atoms -= centre
    values -= middle
    kept = min(atoms.shape[1], values.shape[1])
    axes, model_axes = _axes(atoms, kept), _axes(values, kept)
    projected = atoms @ axes
    u, sizes, v = torch.linalg.svd(projected.T @ (values @ model_axes))
    turn = axes @ u @ v @ model_axes.T * (sizes.sum() / projected.square().sum().clamp_min(1e-30))
    rows = np.empty((len(targets), values.shape[1]), np.float32)
    errors = np.empty(len(targets), np.float32)

    def work(batch: slice) -> None:
        few = targets[batch] - centre
        rows[batch] = (few @ turn + middle).float().cpu().numpy()
        errors[batch] = relative(few - few @ axes @ axes.T, targets[batch]).float().cpu().numpy()

    in_parallel(work, len(targets), problem)
    return Approximated(rows, errors)


def _wide(rows: Floats, problem: Problem) -> Tensor:
    import torch

    return torch.from_numpy(rows).to(problem.device).double()


def _axes(rows: Tensor, kept: int) -> Tensor:
    """The principal axes of centred rows, the most important first: [D, kept]."""
    import torch

    return torch.linalg.eigh(rows.T @ rows)[1].flip(1)[:, :kept]


landmark_pca = Approximation(
    "landmark_pca",
    "The donor's principal components, rotated onto the model's where the tokens are shared.",
    "Orthogonal Procrustes analysis, Schönemann 1966",
    _rotated_rows,
    donor=True,
    torch=True,
)


Numbers = npt.NDArray[np.int64]

NEIGHBOURS = 32
SHARPNESS = 8.0
"""A neighbour's weight is proportional to exp(SHARPNESS · cosine)."""

RIDGE = 0.01
"""The share of a coordinate's mean square that is added to each."""

PIECES = 0.8
"""Pieces may leave so much of the donor's row: 0.8 is a cosine of 0.6. Chosen on the tuning text of the testbed: every token
that is composed competes with its first piece."""

HELD_OUT = 512
"""Shared tokens that are treated as missing, to measure how far neighbours can be trusted."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """The shared tokens, centred.

    units    the donor's rows, of length 1: [N, D]
    lengths  of these rows before: [N]
    values   the model's rows: [N, M]
    """

    units: Floats
    lengths: Floats
    values: Floats

    def rows(self, numbers: Numbers) -> Floats:
        """Some of the donor's rows."""
        return self.units[numbers] * self.lengths[numbers, None]


def _corrected_rows(problem: Problem) -> Approximated:
    """Both tables are centred. A ridge regression over the shared tokens maps the donor's rows to the model's. Then the mean
    error of the map for the nearest shared tokens is corrected, by a share that is fitted to tokens treated as missing.

    A token is composed of its pieces if these, put together, are near to the donor's row by angle, and nearer than any other
    token.
    """
    units, values, targets = problem.atoms(), problem.values(), problem.targets()
    centre, middle = (rows.mean(0, dtype=np.float64).astype(np.float32) for rows in (units, values))
    units -= centre
    values -= middle
    targets -= centre
    lengths = _lengths(units)
    units /= lengths[:, None]
    shared = _Shared(units, lengths, values)
    mapped, share = _fit(problem, shared)
    nearest = _nearest(problem, targets, units)
    rows = targets @ mapped + np.float32(share) * _errors_of_map(nearest, shared, mapped) + middle
    by_neighbours, by_pieces = nearest.errors, _errors_by_pieces(problem, targets, shared)
    composed = by_pieces < np.minimum(by_neighbours, PIECES)
    if composed.any():
        chosen = [pieces if of else () for pieces, of in zip(problem.pieces, composed, strict=True)]
        rows[composed] = compose(chosen, problem, head=problem.head)[composed]
    return Approximated(rows, np.where(composed, by_pieces, by_neighbours).astype(np.float32), composed)


def _fit(problem: Problem, shared: _Shared) -> tuple[Floats, float]:
    """The map from the donor's rows to the model's, float32 [D, M], and the share of its errors that is corrected."""
    count, width = shared.units.shape
    held = np.sort(problem.random().choice(count, min(HELD_OUT, count // 4), replace=False))
    squares, products = np.zeros((width, width)), np.zeros((width, shared.values.shape[1]))

    def add(numbers: Numbers) -> Floats:
        for start in range(0, len(numbers), 4096):
            problem.check()
            batch = numbers[start : start + 4096]
            rows = shared.rows(batch).astype(np.float64)
            nonlocal squares, products
            squares += rows.T @ rows
            products += rows.T @ shared.values[batch]
        ridge = RIDGE * max(float(np.trace(squares)) / width, 1e-30)
        return np.linalg.solve(squares + ridge * np.eye(width), products).astype(np.float32)

    mapped = add(np.setdiff1d(np.arange(count), held))
    share = _share(problem, shared, held, mapped) if len(held) else 1.0
    return add(held), share


def _share(problem: Problem, shared: _Shared, held: Numbers, mapped: Floats) -> float:
    """The share that is best for the tokens held out, from 0 to 1."""
    targets = shared.rows(held)
    change = _errors_of_map(_nearest(problem, targets, shared.units, exclude=held), shared, mapped)
    residuals = shared.values[held] - targets @ mapped
    best = np.vdot(change, residuals) / max(float(np.vdot(change, change)), 1e-30)
    return float(np.clip(best, 0, 1))


def _errors_of_map(nearest: Sparse, shared: _Shared, mapped: Floats) -> Floats:
    """The weighted mean of what the map is wrong by, over the neighbours of each target."""
    theirs = Sparse(nearest.indices, nearest.coefficients * shared.lengths[nearest.indices], nearest.errors)
    return nearest.of(shared.values) - theirs.of(shared.units) @ mapped


def _nearest(problem: Problem, targets: Floats, units: Floats, *, exclude: Numbers | None = None) -> Sparse:
    """The neighbours of each target by angle, with their weights; the error is what the best multiple of the nearest leaves.

    exclude  int64 [n]: a token that is no neighbour
    """
    import torch

    points, directions = torch.from_numpy(units).to(problem.device), torch.from_numpy(targets / _lengths(targets)[:, None])
    k = min(NEIGHBOURS, len(units) - (exclude is not None))
    sums = Sparse.zeros(len(targets), k)

    def work(batch: slice) -> None:
        cosines = directions[batch].to(problem.device) @ points.T
        if exclude is not None:
            cosines[torch.arange(len(cosines)), torch.from_numpy(exclude[batch]).to(problem.device)] = -2
        best = cosines.topk(k, 1)
        sums.indices[batch] = best.indices.cpu().numpy()
        sums.coefficients[batch] = (SHARPNESS * best.values).softmax(1).cpu().numpy()
        sums.errors[batch] = (1 - best.values[:, 0].clamp(0, 1).square()).sqrt().cpu().numpy()

    in_parallel(work, len(targets), problem)
    return sums


def _errors_by_pieces(problem: Problem, targets: Floats, shared: _Shared) -> Floats:
    """The relative length of what the best multiple of a token's pieces leaves of the donor's row; 1 if it is not composed of
    shared tokens."""
    places = {row: i for i, row in enumerate(problem.shared[:, 1].tolist())}
    errors = np.ones(len(targets), np.float32)
    for k, (target, pieces) in enumerate(zip(targets, problem.pieces, strict=True)):
        numbers = [places.get(row, -1) for row in pieces]
        if numbers and min(numbers) >= 0:
            weights = piece_weights(len(numbers), problem.choices.subword_method, head=problem.head)
            composed = weights @ shared.rows(np.array(numbers))
            size = float(np.linalg.norm(composed) * np.linalg.norm(target))
            cosine = float(composed @ target) / size if size else 0.0
            errors[k] = np.sqrt(max(0.0, 1 - max(0.0, cosine) ** 2))
    return errors


def _lengths(rows: Floats) -> Floats:
    return np.maximum(np.linalg.norm(rows, axis=1), np.float32(1e-30))


hybrid = Approximation(
    "hybrid",
    "A linear map from the donor's rows to the model's, corrected by the nearest shared tokens; or the pieces of a token, "
    "where they are nearer to the donor's row.",
    "Ridge regression; neighbours and composition as in TokenAdapt, https://arxiv.org/abs/2505.09738",
    _corrected_rows,
    donor=True,
    pieces=True,
    torch=True,
    reads=("subword_method",),
)
