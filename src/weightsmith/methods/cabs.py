"""cabs: n of every m neighbours, models in turn on what is still free."""

from __future__ import annotations

from dataclasses import replace

from weightsmith.methods.base import Method, Parameter
from weightsmith.methods.consensus_ta import WEIGHT
from weightsmith.methods.family import DENSITY, LAMBDA, task_vector_job

GROUP = Parameter(
    "group", "int", "Neighbours in a row among which the share `density` is kept.", scope="model", default=256, minimum=1
)


METHOD = Method(
    name="cabs",
    title="n of every m neighbours, models in turn on what is still free",
    summary="""The models take turns, in the recipe's order: each keeps, of every `group` neighbours, the share
`density` that it changed most, among the positions that no earlier model has kept. So masks are balanced over the
matrix and never overlap, and the deltas are simply added. The authors keep 64 of 256 and weigh two 7 B models by 1.2
each.""",
    use="""For two models of about the same base skill, the more important one first: what it keeps the next cannot
touch. With densities that sum to more than 1 the last models find little left.""",
    passes="One: the result is written as the inputs are read.",
    source="Yang et al. 2025, CABS: conflict-aware and balanced sparsification, section 3, https://arxiv.org/abs/2503.01874",
    formula="mᵢ = n:m largest of |δᵢ| where m₁ … mᵢ₋₁ are 0;  out = base + λ Σ wᵢ (mᵢ ∘ δᵢ)",
    parameters=(WEIGHT, replace(DENSITY, default=0.25), GROUP, LAMBDA),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: cabs
base_model: ./base
models:
  - model: ./fr
    parameters: {weight: 1.2}
  - model: ./de
    parameters: {weight: 1.2}
dtype: bfloat16
""",
    job=lambda matrix: task_vector_job(matrix, "groups", combine="sum"),
)
