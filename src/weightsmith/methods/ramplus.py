"""ramplus: ram, with what is unique to a model strengthened, over the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightsmith.jobs.job import Job, Matrix
from weightsmith.methods.base import Method, Parameter, always
from weightsmith.methods.family import LAMBDA
from weightsmith.methods.ram import EPSILON

if TYPE_CHECKING:
    from weightsmith.jobs.survey import Survey
    from weightsmith.planner.steps import Settings, Step


def _job(matrix: Matrix) -> Job:
    from weightsmith.jobs.elementwise import ActiveJob, ActiveSurvey

    survey = matrix.survey
    assert isinstance(survey, ActiveSurvey)
    job = ActiveJob(matrix)
    job.factors = strengthened(survey.of(matrix.inputs[1:]), float(matrix.shared["rescale"]))  # type: ignore[arg-type]
    return job


def strengthened(counts: npt.NDArray[np.int64], rescale: float) -> npt.NDArray[np.float64]:
    """Factors [models] from counts [models, 2] of positions where a model is active alone and with others.

    >>> strengthened(np.array([[100, 50], [100, 300], [0, 9]]), 1.2)
    array([1.1, 1.2, 1.2])
    """
    ratio = counts[:, 1] / np.maximum(counts[:, 0], 1)
    return np.asarray(1.0 + (rescale - 1.0) * np.minimum(1.0, ratio), np.float64)


def _survey(merged: Sequence[tuple[Step, Settings]]) -> Survey | None:
    from weightsmith.jobs.elementwise import ActiveSurvey

    return ActiveSurvey() if merged else None


METHOD = Method(
    name="ramplus",
    title="ram, with what is unique to a model strengthened, over the whole model",
    summary="""RAM+ as its authors have it: RAM, where the delta of a model that is active alone is multiplied by λᵢ,
and the counts of unique and shared positions are those of the whole model. Takes a pass over all tensors before the
merge. `rescale` is 1.05 in the authors' code, 1.2 in their examples.""",
    use="As ram, when the models share many of their changes.",
    passes="One over all tensors, before the merge, then the result.",
    source="Reinforced Agent Merging, 2026, section on RAM+, https://arxiv.org/abs/2601.13572",
    formula="λᵢ = 1 + (rescale - 1) · min(1, sharedᵢ / uniqueᵢ) over the model;  ram with λᵢδᵢ where only model i is active",
    parameters=(
        Parameter("rescale", "float", "The largest factor on what is unique to a model.", default=1.05, minimum=1.0),
        EPSILON,
        LAMBDA,
    ),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: ramplus
base_model: ./base
models:
  - model: ./fr
  - model: ./de
dtype: bfloat16
""",
    job=_job,
    survey=_survey,
    elementwise=always,
)
