"""passthrough: tensors as they are, or scaled; the method of layer stacking."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from weightsmith._methods.method import PerModel, always, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="copy tensors unchanged, or scaled",
    family="copy",
    summary="""Takes each tensor from the one model that is listed for it. With `slices`, it stacks layers of one or several
models into a deeper model ("frankenmerge", depth up-scaling). Without `scale`, and if the dtype stays the same, bytes are
copied and never decoded. A scale of 0 on `o_proj` and `down_proj` makes a duplicated layer the identity at first.""",
    use="""For depth up-scaling, and for taking whole layers, or parts of layers by `modules`, from different models. A stack
of repeated layers needs further training before it is better than its source.""",
    passes="One: the result is written as the inputs are read.",
    source="Kim et al. 2023, SOLAR 10.7B: depth up-scaling, section 2, https://arxiv.org/abs/2312.15166",
    formula="out = scale · W",
    base="input",
    max_models=1,
    example="""merge_method: passthrough
slices:
  - sources: [{model: ./base, layer_range: [0, 20]}]
  - sources: [{model: ./base, layer_range: [10, 30]}]
dtype: bfloat16
""",
    copies=lambda scale: scale[0] in (None, 1.0),
    elementwise=always,
)
def passthrough(
    matrix: Matrix, scale: Annotated[PerModel[float | None], "Factor; left out, the bytes are copied."] = None
) -> Job:
    from weightsmith._methods.jobs.combination import CombinationJob

    return CombinationJob(matrix, np.array([1.0 if s is None else s for s in scale]))
