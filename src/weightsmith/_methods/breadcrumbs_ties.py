"""breadcrumbs_ties: drop the largest and smallest deltas, then sign election."""

from __future__ import annotations

from weightsmith._methods import family
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="drop the largest and smallest deltas, then sign election",
    family="sparse",
    summary="""Masks deltas as breadcrumbs does, then elects signs as TIES does. As in mergekit, the deltas that agree are
summed; `normalize: true` averages them.""",
    use="Like breadcrumbs, for models that contradict each other.",
    passes="""Two, up to four when the guess of a threshold fails; one with `density: 1`. With `scope: model` one more,
over all tensors, before the merge, and with `scope: row` one.""",
    source="Davari and Belilovsky 2023, Model Breadcrumbs, section 3, https://arxiv.org/abs/2312.06795",
    formula="δᵢ as breadcrumbs;  s = sign(Σ wᵢδᵢ);  out = base + λ Σ_{agree} wᵢδᵢ",
    example=example_recipe("breadcrumbs_ties", per_model="{weight: 0.6, density: 0.9, gamma: 0.01}"),
    needs=family.of_the_model,
    product=family.model_thresholds,
)
def breadcrumbs_ties(
    matrix: Matrix,
    weight: family.Share,
    density: family.Density = 1.0,
    gamma: family.Gamma = 0.01,
    scope: family.Scope = "tensor",
    normalize: family.NormalizeElected = False,
    rescale: family.Rescale = "none",
    lambda_: family.Lambda = 1.0,
    int8_mask: family.Int8Mask = False,
) -> Job:
    axes = family.Axes("magnitude_outliers", weight, lambda_, density, gamma, scope=scope, rescale=rescale, elect="sum")
    return family.job(matrix, axes, normalize=normalize)
