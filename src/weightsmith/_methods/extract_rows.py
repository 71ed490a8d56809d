"""extract_rows: what two fine-tunes have in common, or what sets them apart, row by row."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import numpy as np

from weightsmith._methods.method import Bounds, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix

_TINY = 1e-8
"""The least length of a vector, as in torch's cosine similarity: vectors of zeros have the cosine 0."""


def extract_coefficients(gram: np.ndarray, alpha: float, beta: float, gamma: float) -> np.ndarray:
    """Coefficients of the base and two models, from inner products of their deltas: float64 [rows, 2, 2] → [rows, 3].

    >>> extract_coefficients(np.array([np.ones((2, 2)), np.eye(2)]), 0.5, 0.0, 1.0)
    array([[0.  , 0.5 , 0.5 ],
           [0.5 , 0.25, 0.25]])
    """
    lengths = np.maximum(np.sqrt(np.maximum(np.diagonal(gram, axis1=1, axis2=2), 0.0)), _TINY)
    cosine = np.clip(gram[:, 0, 1] / (lengths[:, 0] * lengths[:, 1]), -1.0, 1.0)
    similar = ((cosine + 1.0) / 2.0) ** gamma
    share = similar + beta * (1.0 - 2.0 * similar)
    return np.stack([1.0 - share, share * (1.0 - alpha), share * alpha], axis=1)


@merge_method(
    title="what two models have in common, or what sets them apart",
    family="delta",
    summary="""Mixes the deltas of two models, and keeps of each row the share by which the two point in the same direction
(`beta: 0`), or in different directions (`beta: 1`). The share of a row is ((cosine + 1) / 2)^gamma. It is SuperMerger's
`extract`, for image models. Each row of a matrix counts by itself; a vector, such as a bias, is one row.""",
    use="""To keep what two fine-tunes agree on, such as a common style, or to remove it. A larger `gamma` keeps only rows
whose deltas are nearly parallel.""",
    passes="One for matrices. Two for vectors: inner products, then the result.",
    source="hako-mikan, SuperMerger, extract, https://github.com/hako-mikan/sd-webui-supermerger",
    formula="out = base + ((1-alpha) δ₁ + alpha δ₂) · ((1-β) d + β (1-d)),  d = ((cos(δ₁, δ₂) + 1) / 2)^gamma for each row",
    min_models=2,
    max_models=2,
    example=example_recipe("extract_rows", shared="{alpha: 0.5, beta: 0, gamma: 2}"),
)
def extract_rows(
    matrix: Matrix,
    alpha: Annotated[float, "Share of the second model's delta in the mix.", Bounds(0.0, 1.0)] = 0.5,
    beta: Annotated[float, "0 keeps what the models have in common; 1 keeps what sets them apart.", Bounds(0.0, 1.0)] = 0.0,
    gamma: Annotated[float, "Exponent of the similarity: larger values keep less.", Bounds(0.0)] = 1.0,
) -> Job:
    from weightsmith._methods.jobs.combination import GramJob, RowJob

    solve = partial(extract_coefficients, alpha=alpha, beta=beta, gamma=gamma)
    if matrix.cols < matrix.size:
        return RowJob(matrix, solve, deltas=True)
    return GramJob(matrix, lambda gram: solve(gram[None])[0], deltas=True)
