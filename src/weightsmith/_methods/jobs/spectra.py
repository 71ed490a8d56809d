"""Transforms of the singular values of a merged delta (torch, float64)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsmith._methods.jobs.decompose import thin_svd

Tensor = Any  # torch is optional, so mypy cannot use its type

NOTHING = 1e-12
"""A delta's component along a direction below this share of its norm is rounding noise, and counts as zero."""


def flatten(total: Any, beta: float) -> Any:
    """The matrix (float64 [rows, cols]) with singular values (1 - β) S + β · mean S; zeros stay zero."""
    u, s, vt = thin_svd(total)
    flat = ((1.0 - beta) * s + beta * s.mean()) * (s > 0)
    return (u * flat) @ vt


def raise_floor(total: Tensor, share: float) -> Tensor:
    """Raise smaller singular values to the first one at which the cumulative sum, from the largest, reaches `share`."""
    import torch

    u, s, vt = thin_svd(total)
    reached = torch.cumsum(s, 0) >= share * s.sum()
    cut = s[int(reached.to(torch.int64).argmax())]
    return (u * (s.clamp(min=cut) * (s > 0))) @ vt


def calibrate(total: Any, deltas: Sequence[Any], alpha: float) -> Any:
    """A merged delta A = U diag(S) Vᵀ (float64 [rows, cols]) with Sᵣ multiplied by K / Σᵢ max(alpha, cᵢᵣ).

    cᵢᵣ = ⟨uᵣᵀA, uᵣᵀδᵢ⟩ / ‖uᵣᵀδᵢ‖² is the share of model i's delta along uᵣ that the merged delta A contains. K counts the
    models with a component along uᵣ.
    """
    import torch

    u, s, vt = thin_svd(total)
    projected = s[:, None] * vt
    repeats, count = torch.zeros_like(s), torch.zeros_like(s)
    for i in range(len(deltas)):
        delta = deltas[i]
        own = u.T @ delta
        energy = (own * own).sum(1)
        part = energy > (NOTHING * torch.linalg.vector_norm(delta)) ** 2
        along = (projected * own).sum(1) / torch.where(part, energy, torch.ones_like(energy))
        repeats += along.clamp(min=alpha) * part
        count += part
    scale = count / torch.where(count > 0, repeats, torch.ones_like(s))
    return (u * (s * scale)) @ vt


def transform(total: Tensor, deltas: Sequence[Tensor], how: str, strength: float | None) -> Tensor:
    """The merged delta `total` (float64 [rows, cols]) with its spectrum changed; deltas are the models' own."""
    if how == "flatten":
        return flatten(total, 0.1 if strength is None else strength)
    if how == "floor":
        return raise_floor(total, 0.01 if strength is None else strength)
    return calibrate(total, deltas, 1.0 / len(deltas) if strength is None else max(strength, 1e-6))
