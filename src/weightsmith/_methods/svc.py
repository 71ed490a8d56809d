"""svc: task arithmetic with the singular values of the merged delta calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.jobs.decompose import calibrate
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.method import Bounds, example_recipe
from weightsmith.abc.job import Job, Matrix


def merge(deltas: Sequence[Any], weights: Sequence[float], alpha: float) -> Any:
    """Σ wᵢδᵢ, calibrated; deltas float64 [rows, cols] each."""
    return calibrate(sum(delta * weight for delta, weight in zip(deltas, weights, strict=True)), deltas, alpha)


@matrix_method(
    title="task arithmetic, singular values calibrated",
    summary="""Adds the weighted deltas, then corrects what the sum counts twice. Along each left singular direction of the
merged delta, it measures how much of each model's own delta is repeated there, and divides by the mean. Directions that
models share are weakened; those that cancel are strengthened, by at most 1/alpha. `alpha: 1` only weakens. A model without a
part along a direction does not count there. In the authors' code it counts with alpha: of two models, one unchanged, the
other's delta is then scaled by 1.333 instead of 1. The weights are part of the merged delta, so they are corrected as well;
`lambda` scales the result. Embeddings, norms, biases and routers are merged by task arithmetic. Published for vision models
and, with gains, for Llama-2-7B instruction and math models. Requires torch.""",
    use="""After task arithmetic, if the sum is too long in the directions that the models share. The evidence is for vision
models, with some for a 7 B language model. With `alpha: 1` it only shrinks, which is safe.""",
    source="Li et al. 2026, When Shared Knowledge Hurts: Spectral Over-Accumulation in Model Merging (SVC), "
    "https://arxiv.org/abs/2602.05536",
    formula="A = Σ wᵢδᵢ = U diag(S) Vᵀ;  cᵢᵣ = ⟨uᵣᵀA, uᵣᵀδᵢ⟩ / ‖uᵣᵀδᵢ‖²;  "
    "out = base + λ · U diag(Sᵣ · Kᵣ / Σᵢ max(alpha, cᵢᵣ)) Vᵀ over the Kᵣ models with a part along uᵣ",
    otherwise="merged by task arithmetic",
    example=example_recipe("svc", per_model="{weight: 0.6}"),
)
def svc(
    matrix: Matrix,
    weight: Weight = 1.0,
    alpha: Annotated[
        float | None, "Minimum repetition to assume, 1/K for K models by default; 1 only weakens directions.", Bounds(1e-6)
    ] = None,
    lambda_: Lambda = 1.0,
) -> Job:
    floor = 1.0 / len(weight) if alpha is None else alpha
    return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, weight, floor), calibrates=True)
