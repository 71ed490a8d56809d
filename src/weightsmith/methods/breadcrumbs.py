"""breadcrumbs: drop the largest and the smallest deltas, then a sum."""

from __future__ import annotations

from weightsmith.methods.base import Method
from weightsmith.methods.family import (
    DENSITY,
    GAMMA,
    INT8_MASK,
    LAMBDA,
    SCOPE,
    check_normalize,
    model_thresholds,
    normalize,
    rescale,
    task_vector_job,
)
from weightsmith.methods.linear import WEIGHT

METHOD = Method(
    name="breadcrumbs",
    title="drop the largest and the smallest deltas, then a sum",
    summary="""Drops the `gamma` largest elements of each delta, which often are outliers, keeps the next `density` of it,
and zeroes the small rest. Exactly ⌊gamma · n⌋ elements are dropped and ⌊density · n⌋ kept (at least one; fewer are
dropped when not enough would be left). mergekit ranks within the tensor, the paper within each row (`scope: row`; its
values are density 0.15, gamma 0.006, lambda 0.2).""",
    use="""For many fine-tunes, where a few very large deltas of one model would drown the others. Its authors'
strength is small (lambda 0.2 for eight models): tune `lambda`.""",
    passes="""Two, up to four when the guess of a threshold fails; one with `density: 1`. With `scope: model` one more,
over all tensors, before the merge, and with `scope: row` one.""",
    source="Davari and Belilovsky 2023, Model Breadcrumbs, section 3, https://arxiv.org/abs/2312.06795",
    formula="δᵢ = the gamma·n largest of (Wᵢ - base) dropped, the next density·n kept;  out = base + λ Σ wᵢδᵢ",
    parameters=(WEIGHT, DENSITY, GAMMA, SCOPE, normalize(False), rescale("none", "inv_density"), LAMBDA, INT8_MASK),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: breadcrumbs
base_model: ./base
models:
  - model: ./fr
    parameters: {weight: 0.6, density: 0.9, gamma: 0.01}
  - model: ./de
    parameters: {weight: 0.6, density: 0.9, gamma: 0.01}
dtype: bfloat16
""",
    job=lambda matrix: task_vector_job(matrix, "magnitude_outliers"),
    check=check_normalize,
    survey=model_thresholds,
)
