"""train_difference: add one model's training to another, less where the other is there already."""

from __future__ import annotations

from weightsmith._methods.family import Lambda
from weightsmith._methods.method import always, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix

STRENGTH = 1.8
"""The author's factor: the share of the difference is a half where the first model has the base's value."""


@merge_method(
    title="add the training of one model to another",
    family="delta",
    summary="""Adds what the second model was trained for to the first model. The base is what the second was tuned from. Where
the first model has already moved towards the second, less is added; where they are far apart, more. So the first model learns
without being pushed too far. At a position where the first model has the base's value, 0.9 λ times the difference is added. It
is SuperMerger's `trainDifference`, for image models. Element by element.""",
    use="""To add a concept or a style to a model that was trained differently, such as an inpainting or a distilled model.
Unlike task_arithmetic, it does not add the same change twice. The order of the models matters: the first one is changed.""",
    passes="One: the result is written as the inputs are read.",
    source="hako-mikan, SuperMerger, trainDifference, https://github.com/hako-mikan/sd-webui-supermerger",
    formula="out = A + 1.8 λ (B - base) · |B - A| / (|B - A| + |B - base|)",
    min_models=2,
    max_models=2,
    example=example_recipe("train_difference", shared="{lambda: 1.0}"),
    elementwise=always,
)
def train_difference(matrix: Matrix, lambda_: Lambda = 1.0) -> Job:
    from weightsmith._kernels.elementwise import merge_trained
    from weightsmith._methods.jobs.elementwise import ElementwiseJob

    return ElementwiseJob(matrix, merge_trained, STRENGTH * lambda_, sums=1)
