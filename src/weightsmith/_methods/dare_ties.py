"""dare_ties: drop deltas at random, rescale, elect signs, add."""

from __future__ import annotations

from weightsmith._methods import family
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="random drop and rescale, then sign election",
    family="sparse",
    summary="""Masks and rescales at random as DARE does (see dare_linear), then elects signs as TIES does. As in mergekit,
the elected deltas are summed, not averaged, and nothing is trimmed. `normalize: true` takes the disjoint mean of the TIES
paper.""",
    use="Like dare_linear, for models that contradict each other. Results depend on the seed: try several.",
    passes="One with `rescale: none` or `inv_density`; two with `l1`: norms, then the result.",
    source="Yu et al. 2023, https://arxiv.org/abs/2311.03099, with the election of https://arxiv.org/abs/2306.01708",
    formula="δᵢ = rᵢ (mᵢ ∘ (Wᵢ - base));  s = sign(Σ wᵢδᵢ);  out = base + λ Σ_{agree} wᵢδᵢ",
    example=example_recipe("dare_ties", per_model="{weight: 0.6, density: 0.5}"),
)
def dare_ties(
    matrix: Matrix,
    weight: family.Share,
    density: family.Density = 1.0,
    normalize: family.NormalizeElected = False,
    rescale: family.Rescale = "l1",
    lambda_: family.Lambda = 1.0,
    int8_mask: family.Int8Mask = False,
) -> Job:
    axes = family.Axes("random", weight, lambda_, density, rescale=rescale, elect="sum")
    return family.job(matrix, axes, normalize=normalize)
