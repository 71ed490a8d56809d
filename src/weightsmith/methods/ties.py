"""ties: trim, elect sign, disjoint mean."""

from __future__ import annotations

from weightsmith.methods.base import Method
from weightsmith.methods.family import (
    DENSITY,
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
    name="ties",
    title="trim, elect sign, disjoint mean",
    summary="""Keeps the largest deltas of each fine-tune, lets the models elect a sign for every element by the sum
of their weighted deltas (zero elects +), and averages only those that agree. Exactly ⌊density · n⌋ elements of each
tensor are kept (at least one); of equal magnitudes those with the lower flat index. `density: 1`, the default, trims
nothing. The paper ranks the deltas of the whole model: `scope: model`, with `density: 0.2`.""",
    use="""For two to five fine-tunes of one base with different skills, with densities from 0.2 to 0.5. On language
models trimming to a tenth or a fifth at full strength made merges worse than the base
(https://arxiv.org/abs/2511.21437): compare with task_arithmetic, and look at the distance from the base on the card.""",
    passes="""Two, up to four when the guess of a threshold fails; one with `density: 1`. With `scope: model` one more,
over all tensors, before the merge, and with `scope: row` one.""",
    source="Yadav et al. 2023, TIES-Merging, section 3, https://arxiv.org/abs/2306.01708; the default scope is mergekit's",
    formula="δᵢ = trim(Wᵢ - base);  s = sign(Σ wᵢδᵢ);  out = base + λ Σ_{agree} wᵢδᵢ / Σ_{agree} wᵢ",
    parameters=(WEIGHT, DENSITY, SCOPE, normalize(True), rescale("none", "inv_density"), LAMBDA, INT8_MASK),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: ties
base_model: ./base
models:
  - model: ./fr
    parameters: {weight: 1.0, density: 0.5}
  - model: ./de
    parameters: {weight: 1.0, density: 0.5}
dtype: bfloat16
""",
    job=lambda matrix: task_vector_job(matrix, "magnitude", elect="sum"),
    survey=model_thresholds,
)
