"""dare_linear: drop deltas at random, rescale, add."""

from __future__ import annotations

from weightsmith._methods import family
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="random drop and rescale, then sum",
    family="sparse",
    summary="""Keeps each element of a delta with probability `density`, and rescales what is left. The mask depends on the
seed, the model's place in the recipe, the tensor's name and the element's index, so it is the same on every machine. By
default, as in mergekit, rescaling restores the delta's L1 norm (`rescale: l1`). The paper divides by the density (`rescale:
inv_density`).""",
    use="""For fine-tunes with small, redundant deltas, such as supervised fine-tuning with a small learning rate. It adds
noise, which large models tolerate better. Do not use it for deltas of continued pretraining. Results depend on the seed: try
several.""",
    passes="One with `rescale: none` or `inv_density`; two with `l1`: norms, then the result.",
    source="Yu et al. 2023, Language models are super Mario, section 3.1, https://arxiv.org/abs/2311.03099",
    formula="out = base + λ Σ wᵢ rᵢ (mᵢ ∘ (Wᵢ - base)),  mᵢ ~ Bernoulli(density)",
    example=example_recipe("dare_linear", per_model="{weight: 0.6, density: 0.5}"),
    check=family.check_normalize,
)
def dare_linear(
    matrix: Matrix,
    weight: family.Share,
    density: family.Density = 1.0,
    normalize: family.Normalize = False,
    rescale: family.Rescale = "l1",
    lambda_: family.Lambda = 1.0,
    int8_mask: family.Int8Mask = False,
) -> Job:
    axes = family.Axes("random", weight, lambda_, density, rescale=rescale)
    return family.job(matrix, axes, normalize=normalize)
