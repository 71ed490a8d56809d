"""nearswap: move towards the other model where the two are close."""

from __future__ import annotations

from typing import Annotated

from weightsmith._methods.method import always, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="move towards the other model where the two are close",
    family="delta",
    summary="""Takes the other model where the two differ by at most `t`. Elsewhere, the base moves towards the other model by
`t`. In other words, it adds the delta clipped to ±t. Use it to add a trace of one model to another; its author used t =
0.0001.""",
    use="""To add a trace of another model without moving anything far. With t = 0.0001, the result is the base for all
practical purposes, except for weights that were nearly equal anyway.""",
    passes="One: the result is written as the inputs are read.",
    source="alchemonaut, QuartetAnemoi-70B-t0.0001 (model card); mergekit, nearswap",
    formula="out = (1 - u) base + u W,  u = min(1, t / |W - base|);  the same as base + clip(W - base, -t, t)",
    max_models=1,
    example=example_recipe("nearswap", shared="{t: 0.0001}", models=("fr",)),
    elementwise=always,
)
def nearswap(matrix: Matrix, t: Annotated[float, "How far the base moves at most; 0 or less leaves it."]) -> Job:
    from weightsmith._kernels.elementwise import merge_clipped
    from weightsmith._methods.jobs.elementwise import ElementwiseJob

    return ElementwiseJob(matrix, merge_clipped, t, sums=1)
