"""zero: rows of zeros."""

from __future__ import annotations

import numpy as np

from weightsmith.abc.approximation import Approximated, Approximation, Problem


def _make(problem: Problem) -> Approximated:
    width = problem.tables.rows("model", [0]).shape[1]
    return Approximated.without_errors(np.zeros((len(problem.missing), width), np.float32))


zero = Approximation("zero", "Zeros.", "A lower bound for comparisons.", _make)
