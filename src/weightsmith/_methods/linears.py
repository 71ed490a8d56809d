"""The decorator and the job of the methods that work on whole matrices.

They are for the weights of linear layers. All else (embeddings, heads, norms, biases, convolutions, routers) takes the mean of
the weighted deltas, as in the methods' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsmith._base.torch_use import needs_torch
from weightsmith._methods.method import merge_method
from weightsmith.abc.job import Job, Matrix

if TYPE_CHECKING:
    from weightsmith._methods.jobs.matrix import Deltas

matrix_method = partial(
    merge_method,
    family="spectral",
    passes="Two: every matrix is read whole, decomposed, then written.",
    on_device=True,
    otherwise="averaged",
    check=needs_torch,
)
"""`merge_method` for those that take torch and whole matrices."""


def linears_job(
    matrix: Matrix,
    weight: Sequence[float],
    factor: float,
    merge: Callable[[Deltas], Any],
    *,
    calibrates: bool = False,
    copies: int = 8,
    side: int | None = None,
    known: bool = True,
) -> Job:
    """base + λ · merge(weighted deltas) for a linear layer, base + λ · their mean for all else.

    weight      of each model's delta
    factor      λ
    merge       maps deltas (torch float64 [rows, cols] each, times their weights) to the merged delta
    calibrates  merge gets the deltas without their weights; tensors that are not linear layers take their weighted sum
    copies      maximum number of float64 matrices that it holds, not counting square ones
    side        of the largest square matrix it makes; None: the shorter side of the matrix
    known       it is a linear layer of which merge knows what it needs: otherwise it is merged like all else
    """
    weights = np.asarray(weight)
    if matrix.role != "linear" or not known:
        from weightsmith._methods.jobs.combination import sum_of_deltas

        return sum_of_deltas(matrix, factor * weights if calibrates else factor * weights / len(weights))
    from weightsmith._methods.jobs.matrix import MatrixJob

    taken = np.ones(len(weights)) if calibrates else weights
    base = np.array([1.0] + [0.0] * len(weights))
    job = MatrixJob(matrix, merge, base, taken, factor, copies=copies, side=side)
    parameters = {name: value for name, value in matrix.shared.items() if name != "lambda"}
    of_models = [sorted(model.items()) for model in matrix.model_parameters]
    job.identity = repr((matrix.method, sorted(parameters.items()), of_models))
    return job
