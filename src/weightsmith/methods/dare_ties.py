"""dare_ties: drop deltas at random, rescale, elect signs, add."""

from __future__ import annotations

from weightsmith.methods.base import Method
from weightsmith.methods.family import DENSITY, INT8_MASK, LAMBDA, normalize, rescale, task_vector_job
from weightsmith.methods.linear import WEIGHT

METHOD = Method(
    name="dare_ties",
    title="random drop and rescale, then sign election",
    summary="""DARE's random mask and rescaling (see dare_linear), then the sign election of TIES. As in mergekit the
elected deltas are summed, not averaged, and nothing is trimmed; `normalize: true` takes the disjoint mean of the TIES
paper.""",
    use="As dare_linear, for models that contradict each other. Results depend on the seed: try several.",
    passes="One with `rescale: none` or `inv_density`; two with `l1`: norms, then the result.",
    source="Yu et al. 2023, https://arxiv.org/abs/2311.03099, with the election of https://arxiv.org/abs/2306.01708",
    formula="δᵢ = rᵢ (mᵢ ∘ (Wᵢ - base));  s = sign(Σ wᵢδᵢ);  out = base + λ Σ_{agree} wᵢδᵢ",
    parameters=(WEIGHT, DENSITY, normalize(False), rescale("l1", "inv_density"), LAMBDA, INT8_MASK),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: dare_ties
base_model: ./base
models:
  - model: ./fr
    parameters: {weight: 0.6, density: 0.5}
  - model: ./de
    parameters: {weight: 0.6, density: 0.5}
dtype: bfloat16
""",
    job=lambda matrix: task_vector_job(matrix, "random", elect="sum"),
)
