"""splice: rows or columns of one model in the place of another's."""

from __future__ import annotations

from typing import Annotated, Literal

from weightsmith._methods.method import Bounds, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix

_WIDE = 100
"""SuperMerger counts the run along the columns only in tensors with more columns than this, else along the rows."""


def run(length: int, alpha: float, beta: float) -> tuple[int, int, bool]:
    """The positions, first and behind the last, of a run; and whether it is the second model's, or all but it is.

    >>> run(320, 0.5, 0.25), run(320, 0.5, 0.75)
    ((80, 240, True), (80, 240, False))
    """
    if alpha + beta <= 1:
        return int(length * beta), int(length * (alpha + beta)), True
    return int(length * (alpha + beta - 1)), int(length * beta), False


@merge_method(
    title="take a run of rows or columns from another model",
    family="sphere",
    summary="""Takes a run of rows of each tensor from B, and all others from A, the base. No number is mixed. `alpha` is the
share that B supplies, and `beta` the place where its run begins. A run that would pass the end continues at the beginning.
These are `tensor` (`axis: rows`) and `tensor2` (`axis: columns`) of SuperMerger, for image models, and `tensor_sum` of sd-meh.
Rows are the first dimension, and columns the second. As in SuperMerger, a tensor with up to 100 columns has its run counted
along the rows, and vectors have rows only. Of a tensor that holds several matrices, such as a fused `qkv_proj`, each is
spliced.""",
    use="""To combine fine-tunes of one base without mixing their weights. Use it where other programs' recipes call for it:
rows that work together may come from different models.""",
    passes="One: the result is written as the inputs are read.",
    source="hako-mikan, SuperMerger, tensor and tensor2, https://github.com/hako-mikan/sd-webui-supermerger",
    formula="out[i] = B[i] for n beta <= i < n (alpha + beta), else A[i]",
    max_models=1,
    example=example_recipe("splice", shared="{alpha: 0.5, beta: 0.25}", models=["fr"]),
)
def splice(
    matrix: Matrix,
    alpha: Annotated[float, "Share of the rows or columns that come from the other model.", Bounds(0.0, 1.0)] = 0.5,
    beta: Annotated[float, "Where its run begins, as a share of all rows or columns.", Bounds(0.0, 1.0)] = 0.0,
    axis: Annotated[Literal["rows", "columns"], "What is taken."] = "rows",
) -> Job:
    from weightsmith._methods.jobs.combination import SplicedJob

    along = 1 if axis == "columns" and len(matrix.shape) > 1 else 0
    if not matrix.shape:
        return SplicedJob(matrix, 0, 0, 0, inside=True)
    counted = matrix.shape[1] if along and matrix.shape[1] > _WIDE else matrix.shape[0]
    first, end, inside = run(counted, alpha, beta)
    return SplicedJob(matrix, along, first, end, inside=inside)
