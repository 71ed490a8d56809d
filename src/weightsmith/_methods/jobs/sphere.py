"""Means of directions, computed from the angles between them.

A direction is represented by coefficients, float64 [k], over k unit vectors of which only the cosines are known. The order of
additions is fixed and no BLAS is called, so the result is the same on every machine.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

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
