"""john_hewitt: random rows that are distributed as the model's."""

from __future__ import annotations

import numpy as np

from weightsmith.abc.approximation import Approximated, Approximation, Problem, moments


def _make(problem: Problem) -> Approximated:
    """Rows of a normal distribution with the mean and the covariance of all rows; a singular covariance does as well."""
    mean, covariance = moments(problem.tables)
    values, vectors = np.linalg.eigh(covariance)
    factor = (vectors * np.sqrt(np.maximum(values, 0))).T.astype(np.float32)
    random = problem.random().standard_normal((len(problem.missing), len(mean)), np.float32)
    return Approximated.without_errors(random @ factor + mean.astype(np.float32))


john_hewitt = Approximation(
    "john_hewitt",
    "Random rows, normally distributed with the mean and the covariance of all rows.",
    "Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html",
    _make,
)
