"""cosine: takes one of two models where they are alike, and the other where they differ, column by column."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import numpy as np

from weightsmith._methods.method import Bounds, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix

_TINY = 1e-8
"""The least length of a vector, as in torch's cosine similarity: vectors of zeros have the cosine 0."""


def base_shares(gram: np.ndarray, alpha: float, form: str, low: float, high: float) -> np.ndarray:
    """The share of the first model in each column, from its inner products: float64 [columns, 2, 2] → [columns].

    >>> base_shares(np.array([np.ones((2, 2)), np.eye(2)]), 0.0, "b", 0.0, 1.0)
    array([0.75, 0.25])
    """
    lengths = np.maximum(np.sqrt(np.maximum(np.diagonal(gram, axis1=1, axis2=2), 0.0)), _TINY)
    cosines = np.clip(gram[:, 0, 1] / lengths.prod(axis=1), -1.0, 1.0)
    if form == "a":
        units = [float(np.count_nonzero(gram[:, k, k])) for k in range(2)]  # squares of lengths: of columns of length 1
        product = float(np.cumsum(cosines)[-1])
    else:
        units = [float(np.cumsum(gram[:, k, k])[-1]) for k in range(2)]
        product = float(np.cumsum(gram[:, 0, 1])[-1])
    scale = float(np.sqrt(units[0]) * np.sqrt(units[1]))
    whole = product / scale if scale > 0 else 0.0
    similarity = (cosines + whole) / 2.0
    shares: np.ndarray = np.clip((similarity - low) / (high - low) - alpha, 0.0, 1.0)
    return shares


def _check(low: float, high: float) -> str:
    return "" if low < high else f"low is {low:g}, and not below high, {high:g}"


@merge_method(
    title="keep the base where two models agree, else the other",
    family="sphere",
    summary="""Mixes two image models: A, the base, and B. Columns that are alike in both stay close to A, and those that differ
move towards B. These are `cosineA` (`form: a`) and `cosineB` (`form: b`) of SuperMerger. The similarity of a column is the mean
of two cosine similarities: that of the column, and that of the whole tensor. A column is all elements with the same position in
every dimension except the first, so a vector is one column. SuperMerger rescales similarities to their range in the whole
model, without the outermost 1% on both sides. Here, set that range with `low` and `high`.""",
    use="""To keep the structure of one model's images and take details from another. A larger `alpha` takes more of B.
Fine-tunes of one base are so alike that nearly all similarities are above 0.9: raise `low`, or the result is close to a mean
with fixed weights.""",
    passes="Two: inner products, then the result.",
    source="hako-mikan, SuperMerger, cosineA and cosineB, https://github.com/hako-mikan/sd-webui-supermerger; with the default "
    "`low` and `high`, `form: b` is add_cosine_b of sd-mecha, https://github.com/ljleb/sd-mecha",
    formula="out = k A + (1-k) B,  k = clip((s - low)/(high - low) - alpha, 0, 1),  s = (cos(column) + cos(whole))/2",
    max_models=1,
    example=example_recipe("cosine", shared="{alpha: 0.2, form: a, low: 0.9}", models=["fr"]),
    check=_check,
)
def cosine(
    matrix: Matrix,
    alpha: Annotated[float, "Subtracted from the share of the base; 1 gives the other model.", Bounds(0.0, 1.0)] = 0.0,
    form: Annotated[Literal["a", "b"], "Cosine of the whole tensor: `a` first scales columns to one length."] = "a",
    low: Annotated[float, "Similarity at which the share of the base is 0.", Bounds(-1.0, 1.0)] = 0.0,
    high: Annotated[float, "Similarity at which the share of the base is 1.", Bounds(-1.0, 1.0)] = 1.0,
) -> Job:
    from weightsmith._methods.jobs.combination import OuterColumnJob

    return OuterColumnJob(matrix, partial(base_shares, alpha=alpha, form=form, low=low, high=high))
