"""breadcrumbs: drop the largest and the smallest deltas, then sum."""

from __future__ import annotations

from weightsmith._methods import family
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="drop the largest and the smallest deltas, then sum",
    family="sparse",
    summary="""Drops the `gamma` largest elements of each delta, which are often outliers. Keeps the next `density` of the
delta, and zeroes the small rest. Exactly ⌊gamma · n⌋ elements are dropped and ⌊density · n⌋ kept: at least one is kept, and
fewer are dropped if too few would be left. mergekit ranks within the tensor. The paper ranks within each row (`scope: row`),
with density 0.15, gamma 0.006 and lambda 0.2.""",
    use="""For many fine-tunes, where a few very large deltas of one model would drown the others. The authors use a small
strength (lambda 0.2 for eight models), so tune `lambda`.""",
    passes="""Two, up to four when the guess of a threshold fails; one with `density: 1`. With `scope: model` one more,
over all tensors, before the merge, and with `scope: row` one.""",
    source="Davari and Belilovsky 2023, Model Breadcrumbs, section 3, https://arxiv.org/abs/2312.06795",
    formula="δᵢ = the gamma·n largest of (Wᵢ - base) dropped, the next density·n kept;  out = base + λ Σ wᵢδᵢ",
    example=example_recipe("breadcrumbs", per_model="{weight: 0.6, density: 0.9, gamma: 0.01}"),
    check=family.check_normalize,
    needs=family.of_the_model,
    product=family.model_thresholds,
)
def breadcrumbs(
    matrix: Matrix,
    weight: family.Share,
    density: family.Density = 1.0,
    gamma: family.Gamma = 0.01,
    scope: family.Scope = "tensor",
    normalize: family.Normalize = False,
    rescale: family.Rescale = "none",
    lambda_: family.Lambda = 1.0,
    int8_mask: family.Int8Mask = False,
) -> Job:
    axes = family.Axes("magnitude_outliers", weight, lambda_, density, gamma, scope=scope, rescale=rescale)
    return family.job(matrix, axes, normalize=normalize)
