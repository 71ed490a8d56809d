"""model_stock: closer to the base the less the fine-tunes agree."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import numpy as np

from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


def stock_coefficients(gram: np.ndarray, *, pooled: bool) -> np.ndarray:
    """Coefficients of the base and n fine-tunes from the deltas' inner products, float64 [..., n, n] → [..., n + 1].

    pooled  Σ δᵢ·δⱼ / Σ |δᵢ||δⱼ| over the pairs, instead of the mean of their cosines

    A delta of zeros is at a right angle to every other. t = 0 when the cosine is not positive.

    >>> stock_coefficients(np.array([[1.0, 0.5], [0.5, 1.0]]), pooled=False).round(4)
    array([0.3333, 0.3333, 0.3333])
    """
    n = gram.shape[-1]
    norms = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))
    i, j = np.triu_indices(n, 1)
    inner, size = gram[..., i, j], norms[..., i] * norms[..., j]
    if pooled:
        inner, size = inner.sum(axis=-1, keepdims=True), size.sum(axis=-1, keepdims=True)
    cosine = np.clip(inner / np.where(size > 0, size, 1.0), -1.0, 1.0).mean(axis=-1, keepdims=True)
    cosine = np.maximum(cosine, 0.0)
    t = n * cosine / (1.0 + (n - 1) * cosine)
    return np.concatenate([1.0 - t, np.repeat(t / n, n, axis=-1)], axis=-1)


@merge_method(
    title="closer to the base the less the fine-tunes agree",
    family="delta",
    summary="""Interpolates between the base and the average of at least two fine-tunes of it. The angle between the
fine-tunes sets the distance: deltas that point the same way are kept, and orthogonal deltas fall back to the base. There is
no weight to choose. It works best on runs that differ in seed, data order or learning rate. The paper defines one angle
between the deltas; with three or more models, the cosines of all pairs are averaged, as in mergekit. t lies between 0 and 1:
fine-tunes that point away from each other give the base.""",
    use="""For several fine-tunes of one base on the same data, with different seeds or settings: their agreement decides how
far to move from the base. Do not use it for models with different skills: their deltas are almost orthogonal, and the result
stays close to the base.""",
    passes="Two: inner products, then the result. One with `filter_wise: true`.",
    source="Jang et al. 2024, Model Stock, https://arxiv.org/abs/2403.19522",
    formula="cos θ = mean of δᵢ·δⱼ / (|δᵢ||δⱼ|), i < j;  t = n cos θ / (1 + (n-1) cos θ), at least 0;  out = base + t Σ δᵢ / n",
    min_models=2,
    example=example_recipe("model_stock"),
)
def model_stock(
    matrix: Matrix,
    filter_wise: Annotated[bool, "Each row of a matrix has its own angle; a vector is one row."] = False,
    cosine: Annotated[
        Literal["mean", "pooled"],
        "For three models and more: the `mean` of the cosines of the pairs, or `pooled`, Σ δᵢ·δⱼ / Σ |δᵢ||δⱼ|, in which "
        "longer deltas count more.",
    ] = "mean",
) -> Job:
    from weightsmith._methods.jobs.combination import GramJob, RowJob

    solve = partial(stock_coefficients, pooled=cosine == "pooled")
    return (RowJob if filter_wise and matrix.cols < matrix.size else GramJob)(matrix, solve, deltas=True)
