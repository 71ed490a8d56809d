"""task_arithmetic: add weighted differences from a base."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from weightsmith._methods import family
from weightsmith._methods.family import Int8Mask, Lambda, Share, check_normalize
from weightsmith._methods.method import Ignored, PerModel, always, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="sum of task vectors",
    family="delta",
    summary="""Adds the weighted task vectors (fine-tune minus base) of any number of fine-tunes to their base. A negative
weight removes what a fine-tune learned; a weight above 1 extrapolates. Of all methods, it most reliably improves on the base
for language models. `lambda` scales the sum and is the parameter to tune.""",
    use="""The first method to try for fine-tunes of one base: the only one that reliably improved on the base over many
language models in the wild (https://arxiv.org/abs/2511.21437). Start with weights that sum to about 1, and tune `lambda`. All
models need the common base.""",
    passes="One: the result is written as the inputs are read.",
    source="Ilharco et al. 2022, Editing models with task arithmetic, https://arxiv.org/abs/2212.04089",
    formula="out = base + λ Σ wᵢ (Wᵢ - base)   (divided by Σ wᵢ if normalize)",
    example=example_recipe("task_arithmetic", per_model="{weight: 0.6}"),
    check=check_normalize,
    elementwise=always,
)
def task_arithmetic(
    matrix: Matrix,
    weight: Share,
    density: Annotated[PerModel[float], "Not used.", Ignored("task_arithmetic has no sparsifier")] = 1.0,
    normalize: family.Normalize = False,
    rescale: Annotated[bool, "Not used.", Ignored("there is no sparsifier to make up for")] = False,
    lambda_: Lambda = 1.0,
    int8_mask: Int8Mask = False,
) -> Job:
    from weightsmith._methods.jobs.combination import CombinationJob

    weights, factor = np.asarray(weight), lambda_
    if normalize:
        total = float(weights.sum())
        factor /= total if abs(total) >= 1e-8 else 1.0
    # base + λ Σ wᵢ (Wᵢ - base) is a linear combination of the inputs; float64 sums keep it exact enough.
    return CombinationJob(matrix, np.concatenate([[1.0 - factor * weights.sum()], factor * weights]))
