"""Linear algebra of the matrix methods, with torch in float64: singular vectors and polar factors from Gram matrices, and
changes of a merged delta's singular values.

eigh of the smaller Gram matrix is faster than an SVD, especially on a GPU, and accurate enough in float64: it resolves
singular values down to 1e-6 of the largest. The directions of smaller ones are rounding noise. Here they count as zero, with
columns of zeros as singular vectors, where an SVD returns arbitrary ones.

A singular vector is known but for its sign, which a library chooses as rounding has it. `signs` chooses it from the numbers
alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Tensor = Any  # torch is optional, so mypy cannot use its type

TINY = 1e-6
"""Singular values below this share of the largest count as zero."""

CLOSE, SPARE, MOST_TURNS = 1e-12, 8, 8
"""For `leading`: the largest residual, as a share of the largest eigenvalue; directions that it follows beside those that are
wanted; turns after which `eigh` would have been faster."""

ALIKE = 1e-6
"""Elements whose magnitudes differ by less than this share count as equally large."""

NOTHING = 1e-12
"""A delta's component along a direction below this share of its norm is rounding noise, and counts as zero."""


_COLUMNS = 192
"""Columns that `products_of_columns` multiplies at once: 576 of them take 13 ms where all at once take 18."""


def signs(vectors: Tensor) -> Tensor:
    """1 or -1 for each column (float64 [m, k]): the sign of the first of its largest elements; 1 for zeros."""
    import torch

    sizes = vectors.abs()
    first = (sizes >= (1 - ALIKE) * sizes.amax(0)).to(torch.uint8).argmax(0)
    return torch.where(vectors.gather(0, first[None])[0] < 0, -1.0, 1.0).to(vectors.dtype)


def column_basis(a: Tensor) -> Tensor:
    """The left singular vectors of a (float64 [m, n]), [m, min(m, n)], by descending singular value, signs by `signs`.

    An SVD of a itself: it finds the vectors of small singular values too, which `thin_svd` takes for zero. Columns beyond
    the rank of a are zero.
    """
    import torch

    u, s, _ = torch.linalg.svd(a, full_matrices=False)
    real = s > max(a.shape) * torch.finfo(a.dtype).eps * s.max()
    return u * (signs(u) * real)


def leading(gram: Tensor, count: int) -> Tensor | None:
    """Eigenvectors of the `count` largest eigenvalues of a Gram matrix (float64 [n, n]), [n, count], if they are found sooner
    than by `eigh`: few of them, clearly larger than those behind them. Else None.

    Subspace iteration from a fixed random start, until no residual is above `CLOSE` of the largest eigenvalue (Halko,
    Martinsson, Tropp 2011, section 4.5, https://arxiv.org/abs/0909.4061). For deltas of LoRA that takes five turns.
    """
    import torch

    n, width = len(gram), count + SPARE
    if 8 * width > n:
        return None
    start = np.random.Generator(np.random.PCG64(0)).standard_normal((n, width))
    directions, before = torch.linalg.qr(gram @ torch.from_numpy(start).to(gram.device))[0], math.inf
    for turn in range(MOST_TURNS):
        product = gram @ directions
        values, mixed = torch.linalg.eigh(directions.T @ product)
        values, mixed = values.flip(0)[:count], mixed.flip(1)[:, :count]
        vectors = directions @ mixed
        residual = float(torch.linalg.vector_norm(product @ mixed - vectors * values, dim=0).max() / values[0])
        if residual <= CLOSE:
            return vectors
        if not residual < before or (turn and residual * (residual / before) ** (MOST_TURNS - 1 - turn) > CLOSE):
            return None  # also for zeros, whose residual is NaN
        directions, before = torch.linalg.qr(product)[0], residual
    return None


def products_of_columns(a: Tensor) -> Tensor:
    """aᵀa (float64 [m, n] → [n, n]). Only its lower triangle is multiplied, in blocks; the rest is the mirror image."""
    import torch

    n = a.shape[1]
    gram = torch.empty(n, n, dtype=a.dtype, device=a.device)
    step = n if a.is_cuda else _COLUMNS
    for start in range(0, n, step):
        part, rest = slice(start, start + step), slice(start + step, n)
        torch.mm(a[:, start:].T, a[:, part], out=gram[start:, part])
        gram[part, rest] = gram[rest, part].T
    return gram


def thin_svd(a: Tensor, keep: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The `keep` largest singular values of a (float64 [m, n]) with their vectors: u [m, k], s [k], vt [k, n].

    s is descending. Where s is zero, the columns of u and the rows of vt are zero. The signs of u are those of `signs`.
    """
    import torch

    tall = a.shape[0] >= a.shape[1]
    k = min(a.shape) if keep is None else min(keep, *a.shape)
    gram = products_of_columns(a if tall else a.T)
    near = leading(gram, k)
    if near is None:
        near = torch.linalg.eigh(gram)[1].flip(1)[:, :k]
    far = a @ near if tall else a.T @ near
    s = torch.linalg.vector_norm(far, dim=0)
    real = (s > TINY * s.max()).to(a.dtype)
    s = s * real
    near, far = near * real, far / torch.where(s > 0, s, torch.ones_like(s)) * real
    u, v = (far, near) if tall else (near, far)
    sign = signs(u)
    return u * sign, s, (v * sign).T


def polar(a: Tensor) -> Tensor:
    """The orthonormal matrix nearest to a (float64 [m, n]): a (aᵀa)^-½.

    If a is rank-deficient, the result has the same rank and is orthonormal only on a's row and column space.
    """
    u, _, vt = thin_svd(a)
    return u @ vt


def flatten(total: Tensor, beta: float) -> Tensor:
    """The matrix (float64 [rows, cols]) with singular values (1 - β) S + β · mean S; zeros stay zero."""
    u, s, vt = thin_svd(total)
    return (u * flattened(s, beta)) @ vt


def flattened(s: Tensor, beta: float) -> Tensor:
    """Singular values, moved towards their mean; zeros stay zero."""
    return ((1.0 - beta) * s + beta * s.mean()) * (s > 0)


def raise_floor(total: Tensor, share: float) -> Tensor:
    """Raise smaller singular values to the first one at which the cumulative sum, from the largest, reaches `share`."""
    import torch

    u, s, vt = thin_svd(total)
    reached = torch.cumsum(s, 0) >= share * s.sum()
    cut = s[int(reached.to(torch.int64).argmax())]
    return (u * (s.clamp(min=cut) * (s > 0))) @ vt


def calibrate(total: Tensor, deltas: Sequence[Tensor], alpha: float) -> Tensor:
    """A merged delta A = U diag(S) Vᵀ (float64 [rows, cols]) with Sᵣ multiplied by K / Σᵢ max(alpha, cᵢᵣ).

    cᵢᵣ = ⟨uᵣᵀA, uᵣᵀδᵢ⟩ / ‖uᵣᵀδᵢ‖² is the share of model i's delta along uᵣ that the merged delta A contains. K counts the
    models with a component along uᵣ.
    """
    import torch

    u, s, vt = thin_svd(total)
    projected = s[:, None] * vt
    repeats, count = torch.zeros_like(s), torch.zeros_like(s)
    for i in range(len(deltas)):
        delta = deltas[i]
        coefficients = u.T @ delta
        energy = (coefficients * coefficients).sum(1)
        part = energy > (NOTHING * torch.linalg.vector_norm(delta)) ** 2
        along = (projected * coefficients).sum(1) / torch.where(part, energy, torch.ones_like(energy))
        repeats += along.clamp(min=alpha) * part
        count += part
    scale = count / torch.where(count > 0, repeats, torch.ones_like(s))
    return (u * (s * scale)) @ vt


def transform(total: Tensor, deltas: Sequence[Tensor], how: str, strength: float | None) -> Tensor:
    """The merged delta `total` (float64 [rows, cols]) with its spectrum changed; deltas are the models' own."""
    if how == "flatten":
        return flatten(total, 0.1 if strength is None else strength)
    if how == "floor":
        return raise_floor(total, 0.01 if strength is None else strength)
    return calibrate(total, deltas, 1.0 / len(deltas) if strength is None else max(strength, 1e-6))
