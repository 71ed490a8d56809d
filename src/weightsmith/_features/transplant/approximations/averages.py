"""Rows put together from few others: the mean of all rows, the pieces of a token, and the nearest shared tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weightsmith._features.transplant.approximations.pursuit import Sparse, in_parallel, relative
from weightsmith.abc.approximation import Approximated, Approximation, Floats, Problem


def _mean_rows(problem: Problem) -> Approximated:
    sums, count = np.zeros(1), 0  # float64: a sum of 100,000 rows in float32 would lose digits
    for _, rows in problem.tables.chunks("model"):
        sums = sums + rows.sum(0, dtype=np.float64)
        count += len(rows)
    return Approximated.without_errors(np.repeat((sums / count)[None].astype(np.float32), len(problem.missing), 0))


mean = Approximation(
    "mean", "The mean of all rows.", "Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html", _mean_rows
)


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


def _subword_rows(problem: Problem) -> Approximated:
    rows = compose(problem.pieces, problem, head=problem.head)
    lost = np.array([not numbers for numbers in problem.pieces])
    rows[lost] = rows[~lost].mean(0) if not lost.all() else 0
    return Approximated.without_errors(rows, composed=True)


subword = Approximation(
    "subword",
    "The tokens of the model that a token is composed of, put together.",
    "Composition of subwords; the fewest tokens that spell the token.",
    _subword_rows,
    pieces=True,
    reads=("subword_method",),
)


Tensor = Any  # torch is optional, so mypy cannot use its type


def _interpolated_rows(problem: Problem) -> Approximated:
    """The sums of the `k` nearest atoms, with the weights of a scheme."""
    import torch

    targets, atoms = problem.targets(), problem.atoms()
    k, cosine = min(problem.choices.k, len(atoms)), problem.choices.cosine_similarity
    points, donor_rows = torch.from_numpy(atoms).to(problem.device), torch.from_numpy(targets)
    lengths = points.norm(dim=1).clamp_min(1e-30)
    sums = Sparse.zeros(len(targets), k)

    def work(batch: slice) -> None:
        few = donor_rows[batch].to(problem.device)
        products = few @ points.T
        closeness = products / lengths if cosine else products - lengths.square() / 2  # of one target: in the order of nearness
        nearest = closeness.topk(k, 1).indices
        del products, closeness
        near, wide = points[nearest].double(), few.double()
        weights = _SCHEMES[problem.choices.weight_scheme](wide, near, cosine)
        rest = wide - (weights[:, None] @ near)[:, 0]
        sums.indices[batch], sums.coefficients[batch] = nearest.cpu().numpy(), weights.float().cpu().numpy()
        sums.errors[batch] = relative(rest, wide).float().cpu().numpy()

    in_parallel(work, len(targets), problem)
    return Approximated(sums.of(problem.values()), sums.errors)


def _by_distance(targets: Tensor, near: Tensor, cosine: bool) -> Tensor:
    """In proportion to 1 / distance, or to the cosine."""
    if cosine:
        products = (near @ targets[:, :, None])[:, :, 0]
        lengths = near.norm(dim=2) * targets.norm(dim=1)[:, None]
        weights = products / lengths.clamp_min(1e-30)
    else:
        weights = 1 / (near - targets[:, None]).norm(dim=2).clamp_min(1e-6)
    total = weights.sum(1, keepdim=True)
    return weights / total.where(total.abs() > 1e-6, total.new_ones(()))


def _barycentric(targets: Tensor, near: Tensor, cosine: bool) -> Tensor:
    """The best weights that add up to 1: a linear system with a multiplier."""
    import torch

    b, k, _ = near.shape
    system, right_side = near.new_ones(b, k + 1, k + 1), near.new_ones(b, k + 1, 1)
    system[:, :k, :k] = near @ near.transpose(1, 2)
    system[:, k, k] = 0
    right_side[:, :k] = near @ targets[:, :, None]
    return (torch.linalg.pinv(system, hermitian=True) @ right_side)[:, :k, 0]


def _least_squares(targets: Tensor, near: Tensor, cosine: bool) -> Tensor:
    """The best weights; of equally good ones the smallest."""
    import torch

    inverse = torch.linalg.pinv(near @ near.transpose(1, 2), hermitian=True)
    return (inverse @ (near @ targets[:, :, None]))[:, :, 0]


_SCHEMES = {"distance_proportional": _by_distance, "barycentric": _barycentric, "least_squares": _least_squares}


common_interpolation = Approximation(
    "common_interpolation",
    "The weighted mean of the `k` shared tokens that are nearest in the donor.",
    "WECHSEL, Minixhofer et al. 2022, https://arxiv.org/abs/2112.06598",
    _interpolated_rows,
    donor=True,
    torch=True,
    reads=("k", "weight_scheme", "cosine_similarity"),
)
