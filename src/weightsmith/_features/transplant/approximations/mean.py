"""mean: the mean row."""

from __future__ import annotations

import numpy as np

from weightsmith.abc.approximation import Approximated, Approximation, Problem, moments


def _make(problem: Problem) -> Approximated:
    mean, _ = moments(problem.tables)
    return Approximated.without_errors(np.repeat(mean[None].astype(np.float32), len(problem.missing), 0))


mean = Approximation(
    "mean", "The mean of all rows.", "Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html", _make
)
