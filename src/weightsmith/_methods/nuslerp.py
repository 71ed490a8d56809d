"""nuslerp: spherical interpolation with weights, of tensors, rows or columns, of models or of task vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import numpy as np

from weightsmith._methods.family import Share
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


def interpolation(weights: Sequence[float]) -> float:
    """t of the second vector: w₂ / (w₁ + w₂); 0.5 when the sum is below 1e-6, as in mergekit."""
    total = float(weights[0] + weights[1])
    return 0.5 if abs(total) < 1e-6 else float(weights[1]) / total


def nuslerp_coefficients(gram: np.ndarray, t: float) -> np.ndarray:
    """Coefficients of two vectors from their inner products, float64 [2, 2] → float64 [2].

    Unlike slerp this interpolates on the sphere however small the angle is; only collinear vectors (1 - cos² ≤ 1e-16) are
    interpolated linearly.

    >>> nuslerp_coefficients(np.eye(2), 0.25).round(4)
    array([0.9239, 0.3827])
    """
    norms = np.maximum(np.sqrt(np.diag(gram)), 1e-7)
    cosine = min(1.0, max(-1.0, float(gram[0, 1] / (norms[0] * norms[1]))))
    if 1.0 - cosine * cosine <= 1e-16:
        return np.array([1.0 - t, t])
    theta = math.acos(cosine)
    return np.array([math.sin((1.0 - t) * theta), math.sin(t * theta)]) / math.sin(theta)


def each_nuslerp(gram: np.ndarray, t: float, *, deltas: bool) -> np.ndarray:
    """`nuslerp_coefficients` of many pairs of vectors: float64 [vectors, 2, 2] → [vectors, inputs]; deltas: of a base too."""
    norms = np.maximum(np.sqrt(np.diagonal(gram, axis1=1, axis2=2)), 1e-7)
    cosine = np.clip(gram[:, 0, 1] / (norms[:, 0] * norms[:, 1]), -1.0, 1.0)
    collinear = 1.0 - cosine * cosine <= 1e-16
    theta = np.arccos(np.where(collinear, 0.0, cosine))
    a = np.where(collinear, 1.0 - t, np.sin((1.0 - t) * theta) / np.sin(theta))
    b = np.where(collinear, t, np.sin(t * theta) / np.sin(theta))
    return np.stack([1.0 - a - b, a, b] if deltas else [a, b], axis=1)


@merge_method(
    title="spherical interpolation with weights",
    family="sphere",
    summary="""Spherical interpolation of two weighted models (t = w₂ / (w₁ + w₂)). With a base_model, which must not be one
of the two, the task vectors are interpolated and added to the base. `nuslerp_flatten: false` interpolates vector by vector:
the rows of each matrix with `nuslerp_row_wise: true`, its columns otherwise. mergekit 0.1.5 does the opposite of what its
documentation says; here the documented meaning holds.""",
    use="""Like slerp, with weights instead of t. With a base, it rotates one task vector into the other, which preserves
their length. It merges two models only: for more, use multislerp or karcher.""",
    passes="Two: inner products, then the result. One with `nuslerp_flatten: false` and `nuslerp_row_wise: true`.",
    source="mergekit, nuslerp; Shoemake 1985 for the interpolation",
    formula="out = sin((1-t)θ)/sin θ · A + sin(tθ)/sin θ · B;  with a base: base + the same of (A - base), (B - base)",
    base="optional",
    min_models=2,
    max_models=2,
    example=example_recipe("nuslerp", per_model="{weight: 0.5}", base=""),
)
def nuslerp(
    matrix: Matrix,
    weight: Share,
    nuslerp_flatten: Annotated[bool, "Each tensor is one vector."] = True,
    nuslerp_row_wise: Annotated[bool, "With nuslerp_flatten false: rows, not columns."] = False,
) -> Job:
    from weightsmith._methods.jobs.combination import ColumnJob, GramJob, RowJob

    t = interpolation(weight)
    if not nuslerp_flatten and matrix.cols < matrix.size:
        job = RowJob if nuslerp_row_wise else ColumnJob
        return job(matrix, partial(each_nuslerp, t=t, deltas=matrix.base), deltas=matrix.base)

    def solve(gram: np.ndarray) -> np.ndarray:
        a, b = nuslerp_coefficients(gram, t)
        return np.array([1.0 - a - b, a, b]) if matrix.base else np.array([a, b])

    return GramJob(matrix, solve, deltas=matrix.base)
