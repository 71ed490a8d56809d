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
    found: Floats
    if method == "first_last":
        found = np.eye(count, dtype=np.float32)[0 if head else count - 1]
    elif method == "weighted_mean":
        found = np.arange(1, count + 1, dtype=np.float32)[:: -1 if head else 1]
        found /= found.sum()
    else:
        found = np.full(count, 1 if method == "sum" else 1 / count, np.float32)
    return found


def compose(pieces: Sequence[Sequence[int]], problem: Problem, *, head: bool) -> Floats:
    """A row for each sequence of the model's rows: float32 [n, M]; zeros for an empty one."""
    used = np.unique(np.fromiter((number for own in pieces for number in own), np.int64))
    rows = problem.tables.rows("model", used if used.size else np.zeros(1, np.int64))
    out = np.zeros((len(pieces), rows.shape[1]), np.float32)
    for row, own in zip(out, pieces, strict=True):
        if own:
            row[:] = piece_weights(len(own), problem.choices.subword_method, head=head) @ rows[np.searchsorted(used, own)]
    return out


def _make(problem: Problem) -> Approximated:
    rows = compose(problem.pieces, problem, head=problem.head)
    lost = np.array([not own for own in problem.pieces])
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
