"""mean: the mean row."""

from __future__ import annotations

import numpy as np

from weightsmith.abc.approximation import Approximated, Approximation, Problem


def _make(problem: Problem) -> Approximated:
    sums, count = np.zeros(1), 0  # float64: a sum of 100,000 rows in float32 would lose digits
    for _, rows in problem.tables.chunks("model"):
        sums = sums + rows.sum(0, dtype=np.float64)
        count += len(rows)
    return Approximated.without_errors(np.repeat((sums / count)[None].astype(np.float32), len(problem.missing), 0))


mean = Approximation(
    "mean", "The mean of all rows.", "Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html", _make
)
