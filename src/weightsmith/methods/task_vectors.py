"""task_vectors: the task-vector kernel with all its axes open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightsmith.jobs.job import Job, Matrix, Parameters
from weightsmith.methods.base import Method, Parameter
from weightsmith.methods.cabs import GROUP
from weightsmith.methods.consensus_ta import WEIGHT
from weightsmith.methods.family import (
    DENSITY,
    EPSILON,
    GAMMA,
    LAMBDA,
    SCOPE,
    check_probabilities,
    model_thresholds,
    rescale,
    sums_to_zero,
    task_vector_job,
)

if TYPE_CHECKING:
    from weightsmith.jobs.survey import Survey
    from weightsmith.planner.steps import Settings, Step

_ROWS = ("magnitude", "magnitude_outliers")


def _job(matrix: Matrix) -> Job:
    shared = matrix.shared
    return task_vector_job(
        matrix,
        shared["sparsify"],  # type: ignore[arg-type]  # one of the parameter's choices, as are the next two
        elect=shared["elect"],  # type: ignore[arg-type]
        combine=shared["combine"],  # type: ignore[arg-type]
    )


def _check(shared: Parameters, models: Sequence[Parameters]) -> str:
    if shared["scope"] != "tensor" and shared["sparsify"] not in _ROWS:
        return f"scope {shared['scope']} ranks magnitudes, and sparsify is {shared['sparsify']}; use one of {', '.join(_ROWS)}"
    if shared["rescale"] == "inv_probability" and shared["sparsify"] != "row_rank":
        return "rescale inv_probability is for sparsify row_rank, where each element has a probability of its own"
    if shared["combine"] == "mean" and shared["elect"] == "none" and (wrong := sums_to_zero(models)):
        return wrong
    return check_probabilities(shared, models) if shared["sparsify"] == "row_rank" else ""


def _survey(merged: Sequence[tuple[Step, Settings]]) -> Survey | None:
    return model_thresholds([(step, settings) for step, settings in merged if settings.shared["sparsify"] in _ROWS])


METHOD = Method(
    name="task_vectors",
    title="the task-vector kernel with all its axes open",
    summary="""Every method of the family is a point on these axes: which part of each delta stays (`sparsify`,
`scope`, `density`), what makes up for the rest (`rescale`), who decides the sign (`elect`), and how the models are
put together (`combine`). task_arithmetic is the defaults; ties is `{sparsify: magnitude, elect: sum, combine: mean}`.
With `elect: count` each model has one vote, whatever its weight.""",
    use="""To try what no named method does: `elect: count`, groups with an election, thresholds by row. For recipes
that others should recognise, use the named method.""",
    passes="""By its axes: one to apply, one for thresholds of a tensor, one for `rescale: l1`, one over all tensors for
`scope: model`.""",
    source="after Ilharco et al. 2022 (https://arxiv.org/abs/2212.04089) and the pages of the methods it covers",
    formula="out = base + λ combineᵢ( elect( wᵢ · rescale( sparsify(Wᵢ - base) ) ) )",
    parameters=(
        WEIGHT,
        Parameter(
            "sparsify",
            "str",
            "What is kept of a delta: all (`none`), the largest (`magnitude`), those but for the very largest "
            "(`magnitude_outliers`), at random (`random`), at random by rank in the row (`row_rank`), or the largest of each "
            "group of neighbours that no earlier model has kept (`groups`).",
            default="none",
            choices=("none", "magnitude", "magnitude_outliers", "random", "row_rank", "groups"),
        ),
        SCOPE,
        DENSITY,
        GAMMA,
        EPSILON,
        GROUP,
        rescale("none", "inv_density", "inv_probability"),
        Parameter(
            "elect",
            "str",
            "Only deltas of the elected sign count: of the `sum` of all, or by `count` of models.",
            default="none",
            choices=("none", "sum", "count"),
        ),
        Parameter(
            "combine",
            "str",
            "`sum`; `mean`, divided by the weights that contributed; `disjoint_mean`, divided by the number of models that "
            "did; `absmax`, the largest alone.",
            default="sum",
            choices=("sum", "mean", "disjoint_mean", "absmax"),
        ),
        LAMBDA,
    ),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: task_vectors
base_model: ./base
models:
  - model: ./fr
    parameters: {density: 0.3}
  - model: ./de
    parameters: {density: 0.3}
parameters: {sparsify: magnitude, scope: row, elect: count, combine: disjoint_mean}
dtype: bfloat16
""",
    job=_job,
    check=_check,
    survey=_survey,
    elementwise=lambda shared: shared["sparsify"] == "none",
)
