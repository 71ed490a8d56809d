"""multislerp: the weighted mean of directions, of models or of task vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightsmith.jobs.job import Job, Matrix, Parameters
from weightsmith.jobs.sphere import karcher_steps, mean_direction, unit_vectors
from weightsmith.methods.base import Method, Parameter
from weightsmith.methods.family import sums_to_zero
from weightsmith.methods.linear import WEIGHT


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


def _job(matrix: Matrix) -> Job:
    from weightsmith.jobs.combination import GramJob

    shared, weights = matrix.shared, matrix.weights()
    if shared["normalize_weights"]:
        weights = weights / weights.sum()
    eps, steps = float(shared["eps"]), int(shared["karcher_steps"])  # type: ignore[arg-type]

    def solve(gram: np.ndarray) -> np.ndarray:
        found = multislerp_coefficients(gram, weights, eps=eps, steps=steps)
        return np.concatenate([[1.0 - found.sum()], found]) if matrix.base else found

    return GramJob(matrix, solve, deltas=matrix.base)


def _check(shared: Parameters, models: Sequence[Parameters]) -> str:
    weights = [float(m["weight"] or 0) for m in models if "weight" in m]
    if shared["normalize_weights"] and (wrong := sums_to_zero(models)):
        return wrong
    if shared["karcher_steps"] and min(weights, default=0.0) < 0:
        return "karcher_steps walks to a mean, which negative weights do not have"
    return ""


METHOD = Method(
    name="multislerp",
    title="weighted mean of directions",
    summary="""Spherical interpolation of any number of models, each with a weight: of the models, or with a base_model of
their task vectors. As in mergekit this is the normalised mean (nlerp): the tangent-space step that mergekit takes after
it has no length, since the tangents at that mean cancel. For two models of equal length and weight it is slerp with
t = 0.5; in general the true mean on the sphere is near it, and `karcher_steps` walks there: one step is the barycentre in
tangent space, a few are the weighted form of [karcher](karcher.md). Directions that cancel, as those of tensors nobody
tuned, have no mean: their weighted sum is taken. One model besides the base gives base + w (W - base): the model
itself, unless `normalize_weights` is false.""",
    use="""For three or more models where the average would lose length: with a base, for task vectors that point in
different directions. For models that lie close together it is linear.""",
    passes="Two: inner products, then the result.",
    source="mergekit, multislerp; Karcher 1977, Riemannian center of mass and mollifier smoothing, for the steps",
    formula="uᵢ = Wᵢ/|Wᵢ|;  out = |Σ wᵢ |Wᵢ|| · Σ wᵢuᵢ / |Σ wᵢuᵢ|;  with a base: base + the same of the Wᵢ - base",
    parameters=(
        WEIGHT,
        Parameter("normalize_weights", "bool", "Divide the weights by their sum.", default=True),
        Parameter("eps", "float", "Directions cancel when |Σ wᵢuᵢ| is not longer than this.", default=1e-8, minimum=0.0),
        Parameter(
            "karcher_steps", "int", "Steps from there to the true mean on the sphere; 0 is mergekit's.", default=0, minimum=0
        ),
    ),
    base="optional",
    min_models=1,
    max_models=None,
    example="""merge_method: multislerp
base_model: ./base
models:
  - model: ./fr
    parameters: {weight: 0.5}
  - model: ./de
    parameters: {weight: 0.3}
  - model: ./py
    parameters: {weight: 0.2}
dtype: bfloat16
""",
    job=_job,
    check=_check,
)
