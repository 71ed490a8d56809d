"""ramplus: ram, with deltas of one model alone strengthened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt

from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._methods.family import Lambda
from weightsmith._methods.method import Bounds, always, example_recipe, merge_method
from weightsmith._methods.ram import Epsilon
from weightsmith._plans import Product, Settings, Step
from weightsmith.abc.job import Job, Matrix


def strengthened(counts: npt.NDArray[np.int64], rescale: float) -> npt.NDArray[np.float64]:
    """Factors [models] from counts [models, 2] of positions where a model is active alone and with others.

    >>> strengthened(np.array([[100, 50], [100, 300], [0, 9]]), 1.2)
    array([1.1, 1.2, 1.2])
    """
    ratio = counts[:, 1] / np.maximum(counts[:, 0], 1)
    return np.asarray(1.0 + (rescale - 1.0) * np.minimum(1.0, ratio), np.float64)


def _activity(merged: Sequence[tuple[Step, Settings]]) -> Product:
    models = tuple(dict.fromkeys(read.model for step, _ in merged for read in step.inputs[1:]))
    return Product("activity", "activity", (TensorSpec("activity", DTYPES["I64"], (len(models), 2)),), {}, models=models)


@merge_method(
    title="ram, with deltas of one model alone strengthened",
    family="delta",
    summary="""RAM+ as published: RAM, with the delta of a model that is active alone multiplied by λᵢ. Unique and shared
positions are counted over the whole model. Takes a pass over all tensors before the merge. `rescale` is 1.05 in the authors'
code, and 1.2 in their examples.""",
    use="Like ram, when the models share many of their changes.",
    passes="One over all tensors, before the merge, then the result.",
    source="Yuan et al. 2026, Behavior Knowledge Merge in Reinforced Agentic Models (RAM+), https://arxiv.org/abs/2601.13572",
    formula="λᵢ = 1 + (rescale - 1) · min(1, sharedᵢ / uniqueᵢ) over the model;  ram with λᵢδᵢ where only model i is active",
    example=example_recipe("ramplus"),
    needs=always,
    product=_activity,
    elementwise=always,
)
def ramplus(
    matrix: Matrix,
    rescale: Annotated[float, "The largest factor on what is unique to a model.", Bounds(1.0)] = 1.05,
    epsilon: Epsilon = 1e-5,
    lambda_: Lambda = 1.0,
) -> Job:
    from weightsmith._methods.jobs.elementwise import ActiveJob

    activity = matrix.results[0]
    counts = activity.arrays[0][[activity.models.index(model) for model in matrix.inputs[1:]]]
    return ActiveJob(matrix, epsilon, strengthened(counts, rescale), lambda_)
