"""randn: random rows."""

from __future__ import annotations

import numpy as np

from weightsmith.abc.approximation import Approximated, Approximation, Problem


def _make(problem: Problem) -> Approximated:
    width = problem.tables.rows("model", [0]).shape[1]
    return Approximated.without_errors(problem.random().standard_normal((len(problem.missing), width), np.float32))


randn = Approximation("randn", "Independent random numbers of mean 0 and variance 1.", "A lower bound for comparisons.", _make)
