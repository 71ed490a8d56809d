"""The logical matrix that a step makes: what a job is made for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightsmith.checkpoint import Checkpoint
from weightsmith.jobs.job import Matrix
from weightsmith.planner.steps import Plan, Step
from weightsmith.tensors import grain_elements


def matrix_of(plan: Plan, step: Step, inputs: Sequence[Checkpoint], survey: object = None) -> Matrix:
    """The matrix of a step without pieces. survey: what the method asked to know of the whole model."""
    settings = plan.settings[step.settings]
    codes = [inputs[i.model].tensors[i.tensor].spec.dtype.code for i in step.inputs]
    shape = step.out.shape
    return Matrix(
        name=step.out.name,
        size=step.out.size,
        cols=shape[-1] if shape else 1,
        grain=grain_elements(shape),
        codes=np.array(codes, np.int64),
        out_code=step.out.dtype.code,
        base=step.base,
        shared=settings.shared,
        models=settings.models,
        seed=plan.seed,
        inputs=tuple(i.model for i in step.inputs),
        survey=survey,
        shape=shape,
    )
