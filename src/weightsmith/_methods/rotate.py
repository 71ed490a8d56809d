"""rotate: one model's weights, turned so that they are as near as possible to another's."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any

import numpy as np

from weightsmith._base.torch_use import needs_torch
from weightsmith._methods.method import Bounds, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix

_EXACT = 1e-12
"""What differs by less, relative to the largest, differs by rounding in float64."""


def neurons(shape: Sequence[int]) -> tuple[int, int]:
    """The matrix that a tensor of two or more dimensions is turned as. Its rows are the kernels of a 2-D convolution.

    >>> neurons((320, 4, 3, 3)), neurons((320, 320, 1, 1)), neurons((64, 128))
    ((1280, 9), (320, 320), (64, 128))
    """
    kernels = len(shape) == 4 and prod(shape[2:]) != 1
    rows = prod(shape[:2]) if kernels else shape[0]
    return rows, prod(shape[2:] if kernels else shape[1:])


def turned(a: Any, b: Any) -> Any:
    """a (float64 [rows, cols]) times the orthogonal matrix with which it is nearest to b, of the same shape.

    That is U Vᵀ of aᵀb = U S Vᵀ (Schönemann 1966), without the directions of which the singular values are 0. These say
    nothing of how the rest of a turns: it follows the smallest rotation that brings the span of U to that of V.
    """
    import torch

    u, v = directions(a, b)
    result = a @ u @ v.T
    rest = a - a @ u @ u.T
    if torch.linalg.norm(rest) <= _EXACT * torch.linalg.norm(a):
        return result
    x, cosines, y = torch.linalg.svd(u.T @ v, full_matrices=False)  # of the angles between both spans
    u, v = u @ x, v @ y.T
    return result + rest - rest @ v / (1 + cosines) @ (u + v).T


def directions(a: Any, b: Any) -> tuple[Any, Any]:
    """U and V of aᵀb = U S Vᵀ (float64 [cols, rank]), for the singular values above 0."""
    import torch

    if len(a) >= a.shape[1]:
        u, s, vt = torch.linalg.svd(a.T @ b, full_matrices=False)
    else:
        span_a, of_a = torch.linalg.qr(a.T)
        span_b, of_b = torch.linalg.qr(b.T)
        u, s, vt = torch.linalg.svd(of_a @ of_b.T, full_matrices=False)
        u, vt = span_a @ u, vt @ span_b.T
    rank = int((s > s[:1] * _EXACT).sum())
    return u[:, :rank], vt[:rank].T


def merge(inputs: Sequence[Any], shape: tuple[int, int], alpha: float, centre: float) -> Any:
    """(1 - alpha) · the first, turned + alpha · the second, around the mean row of the second: as the inputs, any shape."""
    import torch

    first, second = inputs[0], inputs[1]
    if torch.equal(first, second):
        return first
    a, b = first.reshape(shape), second.reshape(shape)
    of_a, of_b = a.mean(0) * centre, b.mean(0) * centre
    b = b - of_b
    return ((1 - alpha) * turned(a - of_a, b) + alpha * b + of_b).reshape(first.shape)


@merge_method(
    title="turn one model's weights towards another's",
    family="spectral",
    summary="""Turns the rows of each of A's matrices by the rotation or reflection that brings them nearest to the rows of B
(orthogonal Procrustes). Angles between A's rows and their lengths stay as they are. With one model, A is the base and B the
model. With two, both are turned as differences from the base. `alpha` then moves the result towards B. The mean row of each
matrix is turned apart: the result has that of B. Where B says nothing of a direction, A turns no more than it must: if B
equals the base, A stays as it is, except for the mean row. The kernels of a convolution are rows. Vectors are mixed with
`alpha` alone. This is `rotate` of sd-mecha with an `alignment` of 1, for image models. It also turns matrices with fewer rows
than columns, to which sd-mecha since version 0.1 adds A outside the span of B's rows. Requires torch.""",
    use="""For two fine-tunes of one image model, as sd-mecha's recipes do: A's details in B's composition. No evidence for
language models is known.""",
    passes="Two: every matrix is read whole, decomposed, then written.",
    source="ljleb, sd-mecha, rotate, https://github.com/ljleb/sd-mecha",
    formula="out = (1 - alpha) (A - Ā) U Vᵀ + alpha (B - B̄) + B̄,  (A - Ā)ᵀ (B - B̄) = U S Vᵀ",
    max_models=2,
    example=example_recipe("rotate", shared="{alpha: 0.3}", models=["fr"]),
    check=needs_torch,
    on_device=True,
)
def rotate(
    matrix: Matrix,
    alpha: Annotated[float, "Share of B in the mix with the turned A.", Bounds(0.0, 1.0)] = 0.0,
    centralization: Annotated[float, "How much of its mean row each matrix is turned without.", Bounds(0.0, 1.0)] = 1.0,
) -> Job:
    from weightsmith._methods.jobs.combination import CombinationJob
    from weightsmith._methods.jobs.matrix import MatrixJob

    deltas = len(matrix.codes) == 3
    if len(matrix.shape) < 2 or alpha == 1.0:
        return CombinationJob(matrix, np.array([0.0] * deltas + [1 - alpha, alpha]))
    shape = neurons(matrix.shape)
    start = np.array([1.0, 0.0, 0.0]) if deltas else np.zeros(2)
    job = MatrixJob(
        matrix,
        lambda inputs: merge(inputs, shape, alpha, centralization),
        start,
        np.ones(2),
        1.0,
        origin="base" if deltas else "zero",
        copies=12,
        side=min(shape),
    )
    job.identity = repr(("rotate", alpha, centralization, deltas))
    return job
