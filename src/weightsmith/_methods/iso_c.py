"""iso_c: the summed delta with its singular values made equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.jobs.decompose import flatten
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.method import Bounds, example_recipe
from weightsmith.abc.job import Job, Matrix


def merge(deltas: Sequence[Any], beta: float) -> Any:
    """The sum of the deltas (float64 [rows, cols]), flattened."""
    return flatten(sum(deltas), beta)


@matrix_method(
    title="isotropic merge",
    summary="""Adds the deltas up, then makes the singular values of each weight's merged delta equal (`beta: 1`, the paper's
method). A smaller `beta` only moves them towards their mean; 0 is task arithmetic. This gives rare directions the strength of
common ones. A sum of less than full rank stays so: directions that no model moved are left alone. Embeddings, norms, biases
and routers take the mean of the deltas. The paper's evidence is for vision models and T5. On twelve full fine-tunes of
language models at default strength, it lost 5.4 points to the base, more than ties (2511.21437). LoRA deltas suffer most:
nearly all of their spectrum is rounding noise, which a large `beta` raises to full strength. Start with a `beta` of 0.1 or
less. Requires torch.""",
    use="""The evidence is for vision models. On language models in the wild, full flattening was worse than the base, and
lost more with more models (https://arxiv.org/abs/2511.21437). Use a small `beta` (0.1), and check the distance from the
base.""",
    source="Marczak et al. 2025, No Task Left Behind, section 4.1 and its interpolation of spectra, https://arxiv.org/abs/2502.04959",
    formula="Σ wᵢδᵢ = U diag(S) Vᵀ;  out = base + λ · U diag((1 - β) S + β · mean S) Vᵀ",
    example=example_recipe("iso_c", shared="{beta: 0.1, lambda: 0.5}"),
)
def iso_c(
    matrix: Matrix,
    weight: Weight = 1.0,
    beta: Annotated[float, "How far to flatten the spectrum: 0 not at all, 1 all the way.", Bounds(0.0, 1.0)] = 1.0,
    lambda_: Lambda = 1.0,
) -> Job:
    return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, beta))
