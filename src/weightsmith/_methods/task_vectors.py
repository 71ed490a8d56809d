"""task_vectors: any combination of mask, rescaling and sign election."""

from __future__ import annotations

from typing import Annotated

from weightsmith._methods import family
from weightsmith._methods.family import Floats
from weightsmith._methods.jobs.task_vectors import Combine, Election, Sparsifier
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix

_ROWS = ("magnitude", "magnitude_outliers")


def _check(
    scope: str, sparsify: str, rescale: str, combine: str, elect: str, weight: Floats, density: Floats, epsilon: Floats
) -> str:
    if scope != "tensor" and sparsify not in _ROWS:
        return f"scope {scope} ranks magnitudes, and sparsify is {sparsify}; use one of {', '.join(_ROWS)}"
    if rescale == "inv_probability" and sparsify != "row_rank":
        return "rescale inv_probability is for sparsify row_rank, where each element has a probability of its own"
    if combine == "mean" and elect == "none" and (wrong := family.sums_to_zero(weight)):
        return wrong
    return family.check_probabilities(density, epsilon) if sparsify == "row_rank" else ""


@merge_method(
    title="any combination of mask, rescaling and sign election",
    family="sparse",
    summary="""Combines the parts of all methods of the family. Choose which part of each delta is kept (`sparsify`, `scope`,
`density`) and how the loss is made up for (`rescale`). Then choose how signs are elected (`elect`) and how the models are
combined (`combine`). The defaults are task_arithmetic; ties is `{sparsify: magnitude, elect: sum, combine: mean}`. With
`elect: count`, each model has one vote, whatever its weight.""",
    use="""To try what no named method does: `elect: count`, groups with an election, thresholds by row. In recipes for
others, use the named method, which they recognise.""",
    passes="""By its axes: one to apply, one for thresholds of a tensor, one for `rescale: l1`, one over all tensors for
`scope: model`.""",
    source="after Ilharco et al. 2022 (https://arxiv.org/abs/2212.04089) and the pages of the methods it covers",
    formula="out = base + λ combineᵢ( elect( wᵢ · rescale( sparsify(Wᵢ - base) ) ) )",
    example=example_recipe(
        "task_vectors",
        per_model="{density: 0.3}",
        shared="{sparsify: magnitude, scope: row, elect: count, combine: disjoint_mean}",
    ),
    check=_check,
    needs=lambda scope, sparsify: family.of_the_model(scope) and sparsify in _ROWS,
    product=family.model_thresholds,
    elementwise=lambda sparsify: sparsify == "none",
)
def task_vectors(
    matrix: Matrix,
    weight: family.Weight = 1.0,
    sparsify: Annotated[
        Sparsifier,
        "Elements of a delta to keep: all (`none`), the largest (`magnitude`), or the largest without the outliers "
        "(`magnitude_outliers`). Or choose at random (`random`), at random by rank in the row (`row_rank`), or the largest of "
        "each group of neighbours that no earlier model has kept (`groups`).",
    ] = "none",
    scope: family.Scope = "tensor",
    density: family.Density = 1.0,
    gamma: family.Gamma = 0.01,
    epsilon: family.Epsilon = 0.15,
    group: family.Group = 256,
    rescale: family.AnyRescale = "none",
    elect: Annotated[Election, "Only deltas of the elected sign count: of the `sum` of all, or by `count` of models."] = "none",
    combine: Annotated[
        Combine,
        "`sum`. `mean`: divided by the sum of the weights, or after an election, by the sum of |weight| of the models that "
        "agree. `disjoint_mean`: divided by the number of models that contributed. `absmax`: only the largest.",
    ] = "sum",
    lambda_: family.Lambda = 1.0,
) -> Job:
    axes = family.Axes(sparsify, weight, lambda_, density, gamma, epsilon, group, scope, rescale, elect, combine)
    return family.job(matrix, axes)
