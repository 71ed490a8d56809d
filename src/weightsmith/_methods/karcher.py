"""karcher: the mean of any number of models on the sphere."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import numpy as np

from weightsmith._methods.jobs.combination import karcher_steps, mean_direction, unit_vectors
from weightsmith._methods.method import Bounds, always, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


def karcher_coefficients(gram: np.ndarray, max_iter: int, tol: float) -> np.ndarray:
    """Coefficients of the inputs from their inner products, float64 [k, k] → float64 [k].

    Inputs of zeros have no direction: they count in the mean of the norms alone, as in mergekit. Directions that cancel have no
    mean; the walk then begins at the first.

    >>> karcher_coefficients(np.eye(2), 10, 1e-5).round(4)
    array([0.7071, 0.7071])
    """
    norms, cosines = unit_vectors(gram)
    present = norms > 0
    if not present.any() or not np.isfinite(gram).all():
        return np.full(len(gram), 1.0 / len(gram))
    shares = present / present.sum()
    direction = mean_direction(cosines, shares, tol)
    if direction is None:
        direction = np.zeros(len(gram))
        direction[present.argmax()] = 1.0
    direction = karcher_steps(cosines, shares, direction, max_iter, tol)
    return direction * float(norms.mean()) / np.where(present, norms, 1.0)


@merge_method(
    title="mean on the sphere",
    family="sphere",
    summary="""Computes the mean of any number of models in the geometry of the sphere. Each tensor is one long vector. The
mean direction is the point from which the arcs to all models cancel; for two models it is slerp with t = 0.5. All models
count the same, including a base_model, and the length is the mean of their lengths. The angles between fine-tunes of one base
are so small that the result is close to `linear`. The iteration works on the models' inner products, so additional steps cost
nothing.""",
    use="For averages of several models that lie far apart. For fine-tunes of one base it equals linear in bf16; use that.",
    passes="Two: inner products, then the result.",
    source="Karcher 1977, Riemannian center of mass and mollifier smoothing; for models Wang et al. 2026, "
    "Functionality-Oriented LLM Merging on the Fisher-Rao Manifold, https://arxiv.org/abs/2603.04972; mergekit, karcher",
    formula="u ← exp_u(Σ log_u(Wᵢ/|Wᵢ|) / n), from the normalised mean of the Wᵢ/|Wᵢ|;  out = u · Σ |Wᵢ| / n",
    base="input",
    example=example_recipe("karcher", models=("fr", "de", "py"), base=""),
    copies=always,
)
def karcher(
    matrix: Matrix,
    max_iter: Annotated[int, "Steps at most.", Bounds(0)] = 10,
    tol: Annotated[float, "Stop before a step shorter than this (an angle).", Bounds(0.0)] = 1e-5,
) -> Job:
    from weightsmith._methods.jobs.combination import GramJob

    return GramJob(matrix, partial(karcher_coefficients, max_iter=max_iter, tol=tol))
