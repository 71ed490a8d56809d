"""similarity_add: add a difference where two models differ, and mix them where they are alike."""

from __future__ import annotations

from typing import Annotated

from weightsmith._methods.method import Bounds, always, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="add a fine-tune's changes, less where two models agree",
    family="delta",
    summary="""Adds the second model's difference from the base to the first model. Where the two have similar values, it mixes
them instead, so that less is added where they already agree. This is `similarity_add_difference` of sd-meh,
for image models. Each element has a similarity of ((A B / max(|A|, |B|)²) + 1) / 2: 1 for equal values, 0 for opposite
ones. `beta` limits the share of the mix.""",
    use="""To add a style or a concept to an image model that may already have part of it. With `beta: 0`, the result is the
sum of task_arithmetic. The order of the models matters: the first one is changed.""",
    passes="One: the result is written as the inputs are read.",
    source="s1dlx, sd-meh, similarity_add_difference, https://github.com/s1dlx/meh",
    formula="out = (1-s)(A + alpha (B - base)) + s ((1 - alpha/2) A + alpha/2 B),  s = beta (A B / max(|A|,|B|)² + 1)/2",
    min_models=2,
    max_models=2,
    example=example_recipe("similarity_add", shared="{alpha: 0.8, beta: 0.5}"),
    elementwise=always,
)
def similarity_add(
    matrix: Matrix,
    alpha: Annotated[float, "Factor on the difference; half of it is the share of the second model in the mix."] = 1.0,
    beta: Annotated[float, "Share of the mix where the models have equal values.", Bounds(0.0, 1.0)] = 1.0,
) -> Job:
    from weightsmith._kernels.elementwise import merge_similar
    from weightsmith._methods.jobs.elementwise import ElementwiseJob

    return ElementwiseJob(matrix, merge_similar, alpha, beta, sums=1)
