"""svc: task arithmetic with the singular values of the merged delta calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from weightsmith._methods.describe import example_recipe
from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.jobs.decompose import calibrate
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.signature import Bounds
from weightsmith.abc.job import Job, Matrix


def merge(deltas: Sequence[Any], weights: Sequence[float], alpha: float) -> Any:
    """Σ wᵢδᵢ, calibrated; deltas float64 [rows, cols] each."""
    return calibrate(sum(delta * weight for delta, weight in zip(deltas, weights, strict=True)), deltas, alpha)


@matrix_method(
    title="task arithmetic, singular values calibrated",
    summary="""Adds the weighted deltas, and then corrects what the sum counts twice: along each left singular direction
of the merged delta it measures how much of each model's own delta is repeated there, and divides by the mean of that.
Directions that models share are weakened, those that cancel are strengthened, by 1/alpha at most; `alpha: 1` only weakens.
A model that has no part along a direction does not count there; in the authors' code it counts with alpha, so that one tuned
model among two, the other unchanged, gives 1.333 of its delta, where here it gives the delta.
The weights are part of the merged delta and so are corrected as well; `lambda` scales the result. Embeddings, norms, biases
and routers are task arithmetic's. Published for vision models and, with gains, for Llama-2-7B instruction and math models.
Takes torch.""",
    use="""After task arithmetic, when the sum is too long in the directions the models share. The evidence is for
vision models, and some for a 7 B language model; with `alpha: 1` it only shrinks, which is safe.""",
    source="Li et al. 2026, When Shared Knowledge Hurts: Spectral Over-Accumulation in Model Merging (SVC), "
    "https://arxiv.org/abs/2602.05536",
    formula="A = Σ wᵢδᵢ = U diag(S) Vᵀ;  cᵢᵣ = ⟨uᵣᵀA, uᵣᵀδᵢ⟩ / ‖uᵣᵀδᵢ‖²;  "
    "out = base + λ · U diag(Sᵣ · Kᵣ / Σᵢ max(alpha, cᵢᵣ)) Vᵀ over the Kᵣ models with a part along uᵣ",
    otherwise="merged by task arithmetic",
    example=example_recipe("svc", each="{weight: 0.6}"),
)
def svc(
    matrix: Matrix,
    weight: Weight = 1.0,
    alpha: Annotated[
        float | None, "Least repetition that is assumed. Not given: 1/K for K models; 1 only weakens directions.", Bounds(1e-6)
    ] = None,
    lambda_: Lambda = 1.0,
) -> Job:
    floor = 1.0 / len(weight) if alpha is None else alpha
    return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, weight, floor), calibrates=True)
