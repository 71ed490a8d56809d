"""subword: the pieces that a token is composed of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightsmith.abc.approximation import Approximated, Approximation, Floats, Problem


def piece_weights(count: int, method: str, *, head: bool) -> Floats:
    """The weight of each of some pieces. An embedding depends most on the last one, a head on the first.

    >>> piece_weights(3, "weighted_mean", head=False), piece_weights(3, "first_last", head=True)
    (array([0.16666667, 0.33333334, 0.5       ], dtype=float32), array([1., 0., 0.], dtype=float32))
    """
    weights: Floats
    if method == "first_last":
        weights = np.eye(count, dtype=np.float32)[0 if head else count - 1]
    elif method == "weighted_mean":
        weights = np.arange(1, count + 1, dtype=np.float32)[:: -1 if head else 1]
        weights /= weights.sum()
    else:
        weights = np.full(count, 1 if method == "sum" else 1 / count, np.float32)
    return weights


def compose(pieces: Sequence[Sequence[int]], problem: Problem, *, head: bool) -> Floats:
    """A row for each sequence of the model's rows: float32 [n, M]; zeros for an empty one."""
    used = np.unique(np.fromiter((number for numbers in pieces for number in numbers), np.int64))
    rows = problem.tables.rows("model", used if used.size else np.zeros(1, np.int64))
    out = np.zeros((len(pieces), rows.shape[1]), np.float32)
    for row, numbers in zip(out, pieces, strict=True):
        if numbers:
            row[:] = (
                piece_weights(len(numbers), problem.choices.subword_method, head=head) @ rows[np.searchsorted(used, numbers)]
            )
    return out


def _make(problem: Problem) -> Approximated:
    rows = compose(problem.pieces, problem, head=problem.head)
    lost = np.array([not numbers for numbers in problem.pieces])
    rows[lost] = rows[~lost].mean(0) if not lost.all() else 0
    return Approximated.without_errors(rows, composed=True)


subword = Approximation(
    "subword",
    "The tokens of the model that a token is composed of, put together.",
    "Composition of subwords; the fewest tokens that spell the token.",
    _make,
    pieces=True,
    reads=("subword_method",),
)
