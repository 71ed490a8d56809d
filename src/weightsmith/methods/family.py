"""Parameters that the task-vector methods share, and the job they make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from weightsmith.methods.base import Parameter, Parameters
from weightsmith.methods.job import Job, Matrix

LAMBDA = Parameter("lambda", "float", "Factor on the merged task vector.", default=1.0)
INT8_MASK = Parameter("int8_mask", "bool", "Accepted for mergekit recipes.", default=False, ignored="masks take no memory here")
DENSITY = Parameter(
    "density", "float", "Share of the delta that is kept.", scope="model", default=1.0, minimum=0.0, maximum=1.0
)


def normalize(default: bool) -> Parameter:
    """The `normalize` parameter with a method's own default."""
    return Parameter("normalize", "bool", "Divide by the sum of the weights that contributed.", default=default)


def rescale(default: str) -> Parameter:
    """The `rescale` parameter with a method's own default."""
    return Parameter(
        "rescale",
        "str",
        "What the mask took away is made up for: `l1` (mergekit's `true`) restores each delta's L1 norm, "
        "`inv_density` divides by the density (the paper's form), `none` does nothing.",
        default=default,
        choices=("none", "l1", "inv_density"),
        booleans=("none", "l1"),
    )


def check_normalize(shared: Parameters, models: Sequence[Parameters]) -> str:
    """mergekit divides by 1 when the weights sum to zero; nobody means that."""
    total = sum(float(m["weight"] or 0) for m in models if "weight" in m)
    if shared["normalize"] and abs(total) < 1e-8:
        return f"the weights sum to {total:g}, so they cannot be normalised"
    return ""


def task_vector_job(matrix: Matrix, sparsifier: Literal["magnitude", "random"], *, elect: bool) -> Job:
    """The job of a method of the family, from its parameters."""
    from weightsmith.methods.task_vectors import Axes, TaskVectorJob

    shared = matrix.shared
    axes = Axes(
        sparsifier=sparsifier,
        rescale=shared["rescale"],  # type: ignore[arg-type]  # one of the parameter's choices
        elect=elect,
        normalize=bool(shared["normalize"]),
        factor=float(shared["lambda"]),  # type: ignore[arg-type]
    )
    return TaskVectorJob(matrix, axes)
