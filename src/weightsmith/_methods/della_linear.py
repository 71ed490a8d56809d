"""della_linear: drop deltas by rank in their row, rescale, add."""

from __future__ import annotations

from weightsmith._methods import family
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


def _check(weight: family.Floats, normalize: bool, density: family.Floats, epsilon: family.Floats) -> str:
    return family.check_normalize(weight, normalize) or family.check_probabilities(density, epsilon)


@merge_method(
    title="drop by magnitude rank, then sum",
    family="sparse",
    summary="Masks and rescales as della does, then sums the weighted deltas without an election.",
    use="Like della, for models that seldom contradict each other. Results depend on the seed.",
    passes="One, or two with `rescale: l1`: norms, then the result. Ranks elements in every row.",
    source="Deep et al. 2024, DELLA-Merging, section 3.1, https://arxiv.org/abs/2406.11617",
    formula="out = base + λ Σ wᵢ rᵢ (mᵢ ∘ (Wᵢ - base)),  mᵢⱼ ~ Bernoulli(density - ε + 2ε rank/(n - 1))",
    example=example_recipe("della_linear", per_model="{weight: 0.6, density: 0.5, epsilon: 0.1}"),
    check=_check,
)
def della_linear(
    matrix: Matrix,
    weight: family.Share,
    density: family.Density = 1.0,
    epsilon: family.Epsilon = 0.15,
    normalize: family.Normalize = False,
    rescale: family.AnyRescale = "l1",
    lambda_: family.Lambda = 1.0,
    int8_mask: family.Int8Mask = False,
) -> Job:
    axes = family.Axes("row_rank", weight, lambda_, density, epsilon=epsilon, rescale=rescale)
    return family.job(matrix, axes, normalize=normalize)
