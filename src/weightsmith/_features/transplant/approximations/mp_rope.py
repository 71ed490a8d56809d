"""mp_rope: matching pursuit with atoms that are rotated as RoPE rotates positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsmith._features.transplant.pursuit import candidates_of, in_parallel, largest, relative, screened
from weightsmith.abc.approximation import Approximated, Approximation, Problem

Tensor = Any  # torch is optional, so mypy cannot use its type

BATCH = 16
"""Targets that are computed at once."""


def _make(problem: Problem) -> Approximated:
    """Each of `k` atoms is rotated to the position that brings it nearest to what is missing. All coefficients are then the
    least-squares solution, and the model's rows are rotated to the same positions."""
    import torch

    tables = problem.targets(), problem.atoms(), problem.values()
    targets, atoms, values = (torch.from_numpy(rows).to(problem.device) for rows in tables)
    k = min(problem.choices.k, len(atoms))
    m = candidates_of(len(targets), len(atoms), atoms.shape[1], k)
    (model_heads, heads), (model_base, base) = problem.choices.heads, problem.choices.rope_bases
    turning = _frequencies(atoms.shape[1], heads, base), _frequencies(values.shape[1], model_heads, model_base)
    turning = turning[0].to(atoms), turning[1].to(values)
    rows = np.empty((len(targets), values.shape[1]), np.float32)
    errors = np.empty(len(targets), np.float32)

    def work(batch: slice) -> None:
        few = targets[batch]
        best = screened(few, atoms, m)
        chosen, places = _pursue(few, atoms if best is None else atoms[best], k, heads, turning[0])
        numbers = chosen if best is None else best.gather(1, chosen)
        turned = _turned(atoms[numbers], places, heads, turning[0]).double()
        inverse = torch.linalg.pinv(turned @ turned.transpose(1, 2), hermitian=True)
        wide = few.double()
        coefficients = (inverse @ (turned @ wide[:, :, None]))[:, :, 0]
        errors[batch] = relative(wide - (coefficients[:, None] @ turned)[:, 0], wide).float().cpu().numpy()
        ours = _turned(values[numbers], places, model_heads, turning[1])
        rows[batch] = (coefficients.float()[:, None] @ ours)[:, 0].cpu().numpy()

    in_parallel(work, len(targets), problem, BATCH)
    return Approximated(rows, errors)


def _pursue(targets: Tensor, candidates: Tensor, k: int, heads: int, turning: Tensor) -> tuple[Tensor, Tensor]:
    """Which candidates, and their positions: [b, k]. candidates [b, m, D], or [m, D] for all targets"""
    import torch

    b = len(targets)
    rest, used = targets.clone(), torch.zeros(b, candidates.shape[-2], dtype=torch.bool, device=targets.device)
    chosen, places = torch.zeros(b, k, dtype=torch.int64, device=targets.device), targets.new_zeros(b, k)
    for step in range(k):
        chosen[:, step], atom = largest(candidates, rest, used)
        there, back = (_position(atom, sign * rest, heads, turning) for sign in (1, -1))
        place = torch.where(there.abs() < back.abs(), there, back)
        atom, places[:, step] = _turned(atom, place, heads, turning), place
        share = (rest * atom).sum(1) / atom.square().sum(1).clamp_min(1e-30)
        rest = rest - share[:, None] * atom
    return chosen, places


def _frequencies(width: int, heads: int, base: float) -> Tensor:
    """Angles for a step of one position: [width / heads / 2]."""
    import torch

    size = width // heads
    return 1 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)


def _halves(rows: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The first and second halves of each head, which RoPE rotates as pairs: [..., heads, size / 2]."""
    split = rows.unflatten(-1, (heads, -1))
    first, second = split.chunk(2, -1)
    return first, second


def _turned(rows: Tensor, places: Tensor, heads: int, turning: Tensor) -> Tensor:
    """The rows at some positions."""
    import torch

    first, second = _halves(rows, heads)
    angles = places[..., None, None] * turning
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


def _position(rows: Tensor, targets: Tensor, heads: int, turning: Tensor) -> Tensor:
    """The position at which rows are nearest to others: the least-squares fit of the angles of all pairs. [b]."""
    import torch

    (a, b), (c, d) = _halves(rows, heads), _halves(targets, heads)
    angles = torch.atan2(a * d - b * c, a * c + b * d)
    return (angles * turning).sum((-1, -2)) / (heads * turning.square().sum())


mp_rope = Approximation(
    "mp_rope",
    "As `omp`, but each shared token is also rotated, as RoPE rotates positions.",
    "mergekit's matching pursuit with RoPE",
    _make,
    donor=True,
    torch=True,
    reads=("k", "heads", "rope_bases"),
)
