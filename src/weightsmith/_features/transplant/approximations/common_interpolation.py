"""common_interpolation: the nearest shared tokens."""

from __future__ import annotations

from typing import Any

from weightsmith._features.transplant.pursuit import Sparse, in_parallel, relative
from weightsmith.abc.approximation import Approximated, Approximation, Problem

Tensor = Any  # torch is optional, so mypy cannot use its type


def _make(problem: Problem) -> Approximated:
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
    _make,
    donor=True,
    torch=True,
    reads=("k", "weight_scheme", "cosine_similarity"),
)
