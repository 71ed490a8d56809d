"""landmark_pca: principal components of both tables, rotated onto each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsmith._features.transplant.pursuit import in_parallel, relative
from weightsmith.abc.approximation import Approximated, Approximation, Floats, Problem

Tensor = Any  # torch is optional, so mypy cannot use its type


def _make(problem: Problem) -> Approximated:
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
    _make,
    donor=True,
    torch=True,
)
