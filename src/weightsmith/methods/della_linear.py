"""della_linear: drop deltas by rank in their row, rescale, add."""

from __future__ import annotations

from weightsmith.methods.base import Method
from weightsmith.methods.family import (
    DENSITY,
    EPSILON,
    INT8_MASK,
    LAMBDA,
    check_normalize,
    check_probabilities,
    normalize,
    rescale,
    task_vector_job,
)
from weightsmith.methods.linear import WEIGHT

METHOD = Method(
    name="della_linear",
    title="drop by magnitude rank, then a sum",
    summary="""DELLA's mask and rescaling (see della), then a weighted sum of the deltas without an election.""",
    use="As della, for models that seldom contradict each other. Results depend on the seed.",
    passes="One, or two with `rescale: l1`: norms, then the result. Sorts every row.",
    source="Deep et al. 2024, DELLA-Merging, section 3.1, https://arxiv.org/abs/2406.11617",
    formula="out = base + λ Σ wᵢ rᵢ (mᵢ ∘ (Wᵢ - base)),  mᵢⱼ ~ Bernoulli(density - ε + 2ε rank/(n - 1))",
    parameters=(
        WEIGHT, DENSITY, EPSILON, normalize(False), rescale("l1", "inv_density", "inv_probability"), LAMBDA, INT8_MASK,
    ),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: della_linear
base_model: ./base
models:
  - model: ./fr
    parameters: {weight: 0.6, density: 0.5, epsilon: 0.1}
  - model: ./de
    parameters: {weight: 0.6, density: 0.5, epsilon: 0.1}
dtype: bfloat16
""",
    job=lambda matrix: task_vector_job(matrix, "row_rank"),
    check=lambda shared, models: check_normalize(shared, models) or check_probabilities(shared, models),
)  # fmt: skip
