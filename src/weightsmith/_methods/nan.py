"""nan: a mean of the deltas, weighted by their inverse norms."""

from __future__ import annotations

from functools import partial

import numpy as np

from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


def inverse_norm_coefficients(gram: np.ndarray, weights: np.ndarray, factor: float) -> np.ndarray:
    """Coefficients of the base and n fine-tunes from the deltas' inner products, float64 [n, n] → [n + 1].

    A delta of zeros takes no part. factor: what the coefficients of the deltas sum to, if all weights are positive.

    >>> inverse_norm_coefficients(np.diag([1.0, 4.0, 0.0]), np.ones(3), 1.0).round(3)
    array([0.   , 0.667, 0.333, 0.   ])
    """
    norms = np.sqrt(np.diagonal(gram))
    inverse = np.where(norms > 0, weights / np.where(norms > 0, norms, 1.0), 0.0)
    total = np.abs(inverse).sum()
    shares = factor * inverse / (total if total > 0 else 1.0)
    return np.concatenate([[1.0 - shares.sum()], shares])


@merge_method(
    title="inverse norms as weights",
    family="delta",
    summary="""Averages the deltas of any number of fine-tunes. In each tensor, a delta counts by the inverse of its Frobenius
norm, so every delta contributes the same length and the longest does not drown the others. `lambda` scales the mean. These
are NAN's weights; with `lambda` 1 they sum to 1.""",
    use="""For fine-tunes that have moved by very different distances, after more or fewer steps, when you know no good
weights. For deltas of about the same length, it equals `task_arithmetic` with equal weights. On the testbed's small language
model its perplexity was 8.62, and that of `task_arithmetic` of the same size 8.63. Set `lambda` above 1 for fine-tunes with
different skills: a mean is short.""",
    passes="Two: norms, then the result.",
    source="Si et al. 2025, NAN, https://arxiv.org/abs/2505.16148: the weights; norms are of each tensor here",
    formula="cᵢ = (wᵢ/|δᵢ|) / Σ |wⱼ|/|δⱼ|;  out = base + λ Σ cᵢ δᵢ",
    example=example_recipe("nan", shared="{lambda: 1.5}"),
)
def nan(matrix: Matrix, weight: Weight = 1.0, lambda_: Lambda = 1.0) -> Job:
    from weightsmith._methods.jobs.combination import GramJob

    solve = partial(inverse_norm_coefficients, weights=np.asarray(weight), factor=lambda_)
    return GramJob(matrix, solve, deltas=True)
