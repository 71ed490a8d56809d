"""Mean and covariance of the rows of a table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsmith.transplant.approximations.base import Tables

Vector = npt.NDArray[np.float64]


def moments(tables: Tables) -> tuple[Vector, Vector]:
    """The mean of the model's rows, float64 [M], and their covariance, float64 [M, M]. Reads the table once, in chunks."""
    count, total, squares = 0, np.zeros(0), np.zeros((0, 0))
    for first, rows in tables.chunks("model"):
        if not first:
            width = rows.shape[1]
            total, squares = np.zeros(width), np.zeros((width, width))
        count += len(rows)
        total += rows.sum(0, dtype=np.float64)
        squares += rows.T @ rows
    mean = total / count
    return mean, squares / count - np.outer(mean, mean)
