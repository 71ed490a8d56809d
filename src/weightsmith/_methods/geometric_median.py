"""geometric_median: the point with the least sum of distances to the models."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import numpy as np

from weightsmith._methods.jobs.combination import length
from weightsmith._methods.method import Bounds, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix

SAME = 1e-14
"""Fraction of the largest squared distance below which two points count as one. Inner products round to a tenth of it."""


def median_coefficients(gram: np.ndarray, max_iter: int, tol: float) -> np.ndarray:
    """Coefficients of n points from the inner products of the last n - 1 minus the first: float64 [n-1, n-1] → float64 [n].

    A point that is itself the median (of three equal models and one other, the three) is found first: Weiszfeld's iteration
    would take for ever to get there. Where the iterate meets a point that is not, it continues as Vardi and Zhang do.

    >>> median_coefficients(np.array([[1.0, 0.0], [0.0, 1.0]]), 100, 1e-9).round(3)
    array([0.577, 0.211, 0.211])
    """
    n = len(gram) + 1
    products = np.zeros((n, n))
    products[1:, 1:] = gram
    point = np.full(n, 1.0 / n)
    if not np.isfinite(gram).all():
        return point
    diagonal = np.diagonal(products)
    squares = diagonal + diagonal[:, None] - 2.0 * products
    same = SAME * squares.max()
    for k, corner in enumerate(np.eye(n)):
        pull = _inverse_distances(squares[k], same)
        count = int((pull == 0).sum())
        # Below its bound, not at it: of two models each is a median, and the middle is meant.
        if length(products, pull - pull.sum() * corner) < count * (1.0 - 1e-9):
            return corner
    scale = math.sqrt(squares.mean())
    for _ in range(max_iter):
        projections = (products * point).sum(axis=1)
        pull = _inverse_distances(diagonal - 2.0 * projections + (point * projections).sum(), same)
        step = pull / pull.sum() - point
        size = length(products, step)
        held, pulled = float((pull == 0).sum()), float(pull.sum()) * size
        if held >= pulled:
            break
        point = point + (1.0 - held / pulled) * step
        if size <= tol * scale:
            break
    return point


def _inverse_distances(squares: np.ndarray, same: float) -> np.ndarray:
    """1 / distance; 0 for points that are the same."""
    apart = squares > same
    return np.where(apart, 1.0 / np.sqrt(np.where(apart, squares, 1.0)), 0.0)


@merge_method(
    title="geometric median",
    family="average",
    summary="""Finds the point with the smallest sum of distances to all models; each tensor is one vector. This average is
robust: one broken or very different model cannot pull it away, as long as more than half are sound. A model far from the
others counts less, in each tensor separately. If all models are about equally far apart, the result is their mean. Two models
give their mean. A base_model is an input like the others.""",
    use="""For many checkpoints of which a few may be bad: unlike the mean, it does not follow outliers. With two models it is
their mean.""",
    passes="Two: inner products, then the result.",
    source="Weiszfeld 1937, Sur le point pour lequel la somme des distances de n points donnés est minimum. "
    "Vardi and Zhang 2000, The multivariate L1-median and associated data depth. "
    "For models Pillutla et al. 2019, Robust Aggregation, https://arxiv.org/abs/1912.13445",
    formula="out = argmin_m Σ |Wᵢ - m|, by m ← Σ Wᵢ/|Wᵢ - m| / Σ 1/|Wᵢ - m|",
    base="input",
    min_models=2,
    example=example_recipe("geometric_median", models=("fr", "de", "py"), base=""),
)
def geometric_median(
    matrix: Matrix,
    max_iter: Annotated[int, "Steps at most.", Bounds(0)] = 100,
    tol: Annotated[float, "Stop after a step shorter than this share of the distances.", Bounds(0)] = 1e-6,
) -> Job:
    from weightsmith._methods.jobs.combination import GramJob

    # Only differences count, and their products keep the digits that those of the models would lose.
    return GramJob(matrix, partial(median_coefficients, max_iter=max_iter, tol=tol), deltas=True)
