"""The length of rows: new rows get the length that the shared tokens let expect."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsmith.transplant.approximations.base import Floats, Problem

OUTLIERS = 0.01
"""Share of the shared rows at either end whose lengths no new row gets."""


def matched(rows: Floats, problem: Problem, *, use_donor: bool) -> Floats:
    """Rows with the same directions and the expected lengths; a row of zeros stays.

    use_donor  the length follows from that of the donor's row, by a line through the logarithms of the lengths of the shared
               tokens; else it is their median
    """
    if not len(problem.shared):
        return rows
    lengths = _lengths(problem.values())
    expected: npt.NDArray[np.float64] = np.full(len(rows), np.median(lengths))
    if use_donor:
        theirs, wanted = np.log(_lengths(problem.atoms())), np.log(_lengths(problem.targets()))
        spread = theirs - theirs.mean()
        slope = (spread @ np.log(lengths)) / max(spread @ spread, 1e-30)
        low, high = np.quantile(lengths, [OUTLIERS, 1 - OUTLIERS])
        expected = np.clip(np.exp(np.log(lengths).mean() + slope * (wanted - theirs.mean())), low, high)
    return (rows * (expected / _lengths(rows))[:, None]).astype(np.float32)


def _lengths(rows: Floats) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = np.maximum(np.linalg.norm(rows, axis=1).astype(np.float64), 1e-30)
    return found
