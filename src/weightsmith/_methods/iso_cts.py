"""iso_cts: common directions of the sum and some of each model's own, all of one strength."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.jobs.decompose import polar, thin_svd
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.method import Bounds, example_recipe
from weightsmith.abc.job import Job, Matrix


def shares(rank: int, models: int, common: float) -> tuple[int, int]:
    """Directions of the sum, and of each model; together they are `rank`.

    >>> shares(576, 3, 0.8), shares(2, 3, 0.8)
    ((459, 39), (2, 0))
    """
    per_model = round((rank - int(common * rank)) / models)
    while per_model * models > rank:
        per_model -= 1
    return rank - per_model * models, per_model


def merge(deltas: Sequence[Any], common: float) -> Any:
    """mean S · U⊥ V⊥ᵀ of the leading directions of the sum, and of what each delta has outside of them.

    deltas  float64 [rows, cols] each; the result is of that shape
    """
    import torch

    total: Any = sum(deltas)
    of_sum, per_model = shares(min(total.shape), len(deltas), common)
    first = thin_svd(total, of_sum)
    parts = [first]
    if per_model:
        parts += [thin_svd(d - first[0] @ (first[0].T @ d), per_model) for d in deltas]
    strength = torch.cat([p[1] for p in parts]).mean()
    return strength * polar(torch.cat([p[0] for p in parts], 1)) @ polar(torch.cat([p[2] for p in parts], 0).T).T


@matrix_method(
    title="isotropic merge with task-specific directions",
    summary="""Works like iso_c with `beta: 1`, but replaces the weakest directions of the summed delta. The strongest
directions that each model has outside the common ones take their place. All directions are made orthogonal and equally
strong. Embeddings, norms, biases and routers take the mean of the deltas. It has the best published results for many vision
models. There is no good evidence for language models, where iso_c did badly (2511.21437): try tsv_m, svc or ties first.
Requires torch.""",
    use="""Like iso_c, for many models that share little. The evidence is for vision models; full flattening hurts language
models.""",
    source="Marczak et al. 2025, No Task Left Behind, section 4.2 (Iso-CTS), https://arxiv.org/abs/2502.04959",
    formula="U_c, V_c = leading directions of Σ wᵢδᵢ;  Uᵢ, Vᵢ = those of wᵢδᵢ - U_c U_cᵀ wᵢδᵢ;  "
    "out = base + λ · mean S · polar([U_c U₁ … U_N]) polar([V_c V₁ … V_N])ᵀ",
    example=example_recipe("iso_cts", shared="{lambda: 0.5}"),
)
def iso_cts(
    matrix: Matrix,
    weight: Weight = 1.0,
    common: Annotated[
        float, "Share of the rank that goes to common directions; the models share the rest.", Bounds(0.0, 1.0)
    ] = 0.8,
    lambda_: Lambda = 1.0,
) -> Job:
    return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, common))
