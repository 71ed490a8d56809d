"""cabs: n:m sparsity, without overlap between the models."""

from __future__ import annotations

from weightsmith._methods import family
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="n:m sparsity, without overlap between the models",
    family="sparse",
    summary="""The models take turns, in the recipe's order. Each looks at every `group` neighbours in a row, and keeps the
share `density` that it changed most, among the positions that no earlier model has kept. So masks are balanced over the
matrix and never overlap, and the deltas are simply added. The authors keep 64 of 256, and give each of two 7 B models a
weight of 1.2. Here a group ends with its row. The authors' groups run on over the flattened matrix, which is the same if the
number of columns is a multiple of `group`. With 576 columns, 3% of the kept positions differ.""",
    use="""For two models with about the same basic skill. List the more important one first: the next model cannot touch what
it keeps. If the densities sum to more than 1, little is left for the last models.""",
    passes="One: the result is written as the inputs are read.",
    source="Yang et al. 2025, CABS: conflict-aware and balanced sparsification, section 3, https://arxiv.org/abs/2503.01874",
    formula="mᵢ = n:m largest of |δᵢ| where m₁ … mᵢ₋₁ are 0;  out = base + λ Σ wᵢ (mᵢ ∘ δᵢ)",
    example=example_recipe("cabs", per_model="{weight: 1.2}"),
)
def cabs(
    matrix: Matrix,
    weight: family.Weight = 1.0,
    density: family.Density = 0.25,
    group: family.Group = 256,
    lambda_: family.Lambda = 1.0,
) -> Job:
    return family.job(matrix, family.Axes("groups", weight, lambda_, density, group=group))
