"""dare_linear: drop deltas at random, rescale, add."""

from __future__ import annotations

from weightsmith.methods.base import Method
from weightsmith.methods.family import (
    DENSITY,
    INT8_MASK,
    LAMBDA,
    check_normalize,
    normalize,
    rescale,
    task_vector_job,
)
from weightsmith.methods.linear import WEIGHT

METHOD = Method(
    name="dare_linear",
    title="random drop and rescale, then a sum",
    summary="""Keeps each element of a delta with probability `density` and rescales what is left. The mask is a
function of the seed, the model's place in the recipe, the tensor's name and the element's index: the same on every
machine. mergekit rescales so that the delta's L1 norm is restored (`rescale: l1`, the default here too); the paper
divides by the density (`rescale: inv_density`).""",
    use="""For fine-tunes whose deltas are small and redundant (supervised fine-tuning with a small learning rate).
Adds noise, which large models take better; not for deltas of continued pretraining. Results depend on the seed: try
several.""",
    passes="One with `rescale: none` or `inv_density`; two with `l1`: norms, then the result.",
    source="Yu et al. 2023, Language models are super Mario, section 3.1, https://arxiv.org/abs/2311.03099",
    formula="out = base + λ Σ wᵢ rᵢ (mᵢ ∘ (Wᵢ - base)),  mᵢ ~ Bernoulli(density)",
    parameters=(WEIGHT, DENSITY, normalize(False), rescale("l1", "inv_density"), LAMBDA, INT8_MASK),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: dare_linear
base_model: ./base
models:
  - model: ./fr
    parameters: {weight: 0.6, density: 0.5}
  - model: ./de
    parameters: {weight: 0.6, density: 0.5}
dtype: bfloat16
""",
    job=lambda matrix: task_vector_job(matrix, "random"),
    check=check_normalize,
)
