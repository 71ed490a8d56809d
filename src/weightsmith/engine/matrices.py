"""The logical matrices of a step: what jobs are made for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightsmith.checkpoint import Checkpoint
from weightsmith.jobs.job import Matrix
from weightsmith.planner.steps import Plan, Step
from weightsmith.tensors import grain_elements


def matrices(plan: Plan, step: Step, inputs: Sequence[Checkpoint], survey: object = None) -> list[Matrix]:
    """One for each expert of a fused tensor, else one. survey: what the method asked to know of the whole model."""
    settings = plan.settings[step.settings]
    codes = [inputs[i.model].tensors[i.tensor].spec.dtype.code for i in step.inputs]
    shape, size = step.out.shape, step.out.size // step.matrices
    return [
        Matrix(
            name=step.out.name,
            index=m * size,
            size=size,
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
            shape=shape if step.matrices == 1 else shape[1:],
        )
        for m in range(step.matrices)
    ]
