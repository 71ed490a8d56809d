"""multislerp: the weighted mean of directions, of models or of task vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from weightsmith._methods.family import Share, sums_to_zero
from weightsmith._methods.jobs.combination import karcher_steps, mean_direction, unit_vectors
from weightsmith._methods.method import Bounds, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


def multislerp_coefficients(gram: np.ndarray, weights: np.ndarray, *, eps: float, steps: int) -> np.ndarray:
    """Coefficients of k vectors from their inner products, float64 [k, k] → float64 [k].

    The direction is that of Σ wᵢ uᵢ over the unit vectors, the length |Σ wᵢ |xᵢ||. Where directions cancel (vectors of zeros
    among them) it is the weighted sum.

    >>> multislerp_coefficients(np.eye(2), np.array([0.5, 0.5]), eps=1e-8, steps=0).round(4)
    array([0.7071, 0.7071])
    """
    norms, cosines = unit_vectors(gram)
    present = norms > 0
    direction = mean_direction(cosines, np.where(present, weights, 0.0), eps)
    if direction is None:
        return weights
    if steps:
        direction = karcher_steps(cosines, weights * present / (weights * present).sum(), direction, steps, 0.0)
    return direction * abs(float((weights * norms).sum())) / np.where(present, norms, 1.0)


def _check(weight: Sequence[float], normalize_weights: bool, karcher_steps: int) -> str:
    if normalize_weights and (wrong := sums_to_zero(weight)):
        return wrong
    if karcher_steps and min(weight, default=0.0) < 0:
        return "karcher_steps walks to a mean, which negative weights do not have"
    return ""


@merge_method(
    title="weighted mean of directions",
    family="sphere",
    summary="""Spherical interpolation of any number of weighted models, or of their task vectors if there is a base_model. As
in mergekit, this is the normalised mean (nlerp). The tangent-space step that mergekit takes after it has no length, because
the tangents at that mean cancel. For two models of equal length and weight, it is slerp with t = 0.5. In general the true
mean on the sphere is nearby, and `karcher_steps` moves towards it. One step gives the barycentre in tangent space; a few give
the weighted form of [karcher](karcher.md). Directions that cancel have no mean, such as those of tensors that no model
changed; their weighted sum is taken. One model besides the base gives base + w (W - base): the model itself, unless
`normalize_weights` is false.""",
    use="""For three or more models where the average would lose length, and with a base, for task vectors that point in
different directions. For models that lie close together, it is linear.""",
    passes="Two: inner products, then the result.",
    source="mergekit, multislerp; Karcher 1977, Riemannian center of mass and mollifier smoothing, for the steps",
    formula="uᵢ = Wᵢ/|Wᵢ|;  out = |Σ wᵢ |Wᵢ|| · Σ wᵢuᵢ / |Σ wᵢuᵢ|;  with a base: base + the same of the Wᵢ - base",
    base="optional",
    example=example_recipe(
        "multislerp", per_model=("{weight: 0.5}", "{weight: 0.3}", "{weight: 0.2}"), models=("fr", "de", "py")
    ),
    check=_check,
)
def multislerp(
    matrix: Matrix,
    weight: Share,
    normalize_weights: Annotated[bool, "Divide the weights by their sum."] = True,
    eps: Annotated[float, "Directions cancel when |Σ wᵢuᵢ| is not longer than this.", Bounds(0.0)] = 1e-8,
    karcher_steps: Annotated[int, "Steps from there to the true mean on the sphere; 0 is mergekit's.", Bounds(0)] = 0,
) -> Job:
    from weightsmith._methods.jobs.combination import GramJob

    weights = np.asarray(weight)
    if normalize_weights:
        weights = weights / weights.sum()

    def solve(gram: np.ndarray) -> np.ndarray:
        coefficients = multislerp_coefficients(gram, weights, eps=eps, steps=karcher_steps)
        return np.concatenate([[1.0 - coefficients.sum()], coefficients]) if matrix.base else coefficients

    return GramJob(matrix, solve, deltas=matrix.base)
