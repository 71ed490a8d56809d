"""linear: the weighted average of checkpoints."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from weightsmith._methods.family import Share, check_normalize
from weightsmith._methods.method import always, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="weighted average",
    family="average",
    summary="""Computes the weighted average of two or more checkpoints ("model soups"). Robust and cheap. Use it for
checkpoints of one training run, or for fine-tunes of one base that do not disagree. With `normalize: false`, weights may be
negative or have any sum. A base_model is an input like the others, and needs a weight of its own.""",
    use="""For checkpoints of one run, for seeds of one fine-tune, and as the baseline that a cleverer method has to beat. Do
not use it for fine-tunes of different bases. It is weak if each model knows something different, because everything is
diluted.""",
    passes="One: the result is written as the inputs are read.",
    source="Wortsman et al. 2022, Model soups, https://arxiv.org/abs/2203.05482",
    formula="out = Σ wᵢ Wᵢ / Σ wᵢ   (without the division if normalize is false)",
    base="input",
    example=example_recipe("linear", per_model=("{weight: 0.6}", "{weight: 0.4}"), base=""),
    check=check_normalize,
    elementwise=always,
)
def linear(matrix: Matrix, weight: Share, normalize: Annotated[bool, "Divide by the sum of the weights."] = True) -> Job:
    from weightsmith._methods.jobs.combination import CombinationJob

    weights = np.asarray(weight)
    return CombinationJob(matrix, weights / weights.sum() if normalize else weights)
