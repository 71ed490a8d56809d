"""iso_c: the summed delta with its singular values made equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from weightsmith._methods.describe import example_recipe
from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.jobs.decompose import flatten
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.signature import Bounds
from weightsmith.abc.job import Job, Matrix


def merge(deltas: Sequence[Any], beta: float) -> Any:
    """The sum of the deltas (float64 [rows, cols]), flattened."""
    return flatten(sum(deltas), beta)


@matrix_method(
    title="isotropic merge",
    summary="""Adds the deltas up and makes the singular values of each weight's merged delta equal (`beta: 1`, the
paper's method), or moves them towards their mean (a smaller `beta`; 0 is task arithmetic). That gives rare directions the
strength of common ones. Where the sum has less than full rank it stays so: directions that no model moved are left
alone. Embeddings, norms, biases and routers take the mean of the deltas. The paper's evidence is for vision models and T5;
on full fine-tunes of language models at default strength it lost 5.4 points to the base with twelve models, more than
ties (2511.21437), and LoRA deltas suffer most: nearly all of their spectrum is rounding noise, which a large `beta` raises
to full strength. Begin with a `beta` of 0.1 or less. Takes torch.""",
    use="""The evidence is for vision models; on language models in the wild full flattening lost to the base, and the
more the more models were merged (https://arxiv.org/abs/2511.21437). Use a small `beta` (0.1), and look at the distance from
the base.""",
    source="Marczak et al. 2025, No Task Left Behind, section 4.1 and its interpolation of spectra, https://arxiv.org/abs/2502.04959",
    formula="Σ wᵢδᵢ = U diag(S) Vᵀ;  out = base + λ · U diag((1 - β) S + β · mean S) Vᵀ",
    example=example_recipe("iso_c", shared="{beta: 0.1, lambda: 0.5}"),
)
def iso_c(
    matrix: Matrix,
    weight: Weight = 1.0,
    beta: Annotated[float, "How flat the spectrum is made: 0 not at all, 1 wholly.", Bounds(0.0, 1.0)] = 1.0,
    lambda_: Lambda = 1.0,
) -> Job:
    return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, beta))
