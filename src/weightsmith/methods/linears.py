"""What the methods that work on whole matrices share: parameters, and their job.

They are for the weights of linear layers. All else (embeddings, heads, norms, biases, convolutions, routers) takes the mean of
the weighted deltas, as in the methods' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weightsmith.jobs.linears import is_linear
from weightsmith.methods.base import Parameter

if TYPE_CHECKING:
    from weightsmith.jobs.job import Job, Matrix

WEIGHT = Parameter("weight", "float", "Factor on this model's delta.", scope="model", default=1.0)


def number(matrix: Matrix, name: str) -> float:
    """A parameter of the tensor."""
    return float(matrix.shared[name])  # type: ignore[arg-type]  # checked when the recipe was read


def linears_job(
    matrix: Matrix,
    merge: Callable[[Sequence[Any]], Any],
    *,
    calibrates: bool = False,
    copies: int = 8,
    side: int | None = None,
) -> Job:
    """base + λ · merge(weighted deltas) for a linear layer, base + λ · their mean for all else.

    merge       maps deltas (torch float64 [rows, cols] each, times their weights) to the merged delta
    calibrates  merge gets the deltas without their weights, and what is not a linear layer takes their weighted sum
    copies      matrices of float64 that it holds at most, beside square ones
    side        of the largest square matrix it makes; None: the shorter side of the matrix
    """
    import numpy as np

    factor, weights = number(matrix, "lambda"), matrix.weights()
    if not is_linear(matrix.name, matrix.shape):
        from weightsmith.jobs.combination import CombinationJob

        share = factor * weights if calibrates else factor * weights / len(weights)
        return CombinationJob(matrix, np.concatenate([[1.0 - share.sum()], share]))
    from weightsmith.jobs.matrix import MatrixJob

    taken = np.ones(len(weights)) if calibrates else weights
    base = np.array([1.0] + [0.0] * len(weights))
    return MatrixJob(matrix, merge, base, taken, factor, copies=copies, side=side)
