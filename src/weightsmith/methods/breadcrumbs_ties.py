"""breadcrumbs_ties: drop the largest and the smallest deltas, then sign election."""

from __future__ import annotations

from weightsmith.methods.base import Method
from weightsmith.methods.family import (
    DENSITY,
    GAMMA,
    INT8_MASK,
    LAMBDA,
    SCOPE,
    model_thresholds,
    normalize,
    rescale,
    task_vector_job,
)
from weightsmith.methods.linear import WEIGHT

METHOD = Method(
    name="breadcrumbs_ties",
    title="drop the largest and the smallest deltas, then sign election",
    summary="""The deltas of breadcrumbs (see there), then the sign election of TIES. As in mergekit what agrees is
summed; `normalize: true` averages it.""",
    use="As breadcrumbs, for models that contradict each other.",
    passes="""Two, up to four when the guess of a threshold fails; one with `density: 1`. With `scope: model` one more,
over all tensors, before the merge, and with `scope: row` one.""",
    source="Davari and Belilovsky 2023, Model Breadcrumbs, section 3, https://arxiv.org/abs/2312.06795",
    formula="δᵢ as breadcrumbs;  s = sign(Σ wᵢδᵢ);  out = base + λ Σ_{agree} wᵢδᵢ",
    parameters=(WEIGHT, DENSITY, GAMMA, SCOPE, normalize(False), rescale("none", "inv_density"), LAMBDA, INT8_MASK),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: breadcrumbs_ties
base_model: ./base
models:
  - model: ./fr
    parameters: {weight: 0.6, density: 0.9, gamma: 0.01}
  - model: ./de
    parameters: {weight: 0.6, density: 0.9, gamma: 0.01}
dtype: bfloat16
""",
    job=lambda matrix: task_vector_job(matrix, "magnitude_outliers", elect="sum"),
    survey=model_thresholds,
)
