"""ties: trim, elect sign, disjoint mean."""

from __future__ import annotations

from weightsmith._methods import family
from weightsmith._methods.method import example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="trim, elect sign, disjoint mean",
    family="sparse",
    summary="""Keeps the largest deltas of each fine-tune. Elects a sign for every element by the sum of the weighted deltas
(zero elects +), and averages only the deltas that agree. Exactly ⌊density · n⌋ elements of each tensor are kept, at least
one. Among equal magnitudes, those with the lower flat index are kept. `density: 1`, the default, trims nothing. The sum is
divided by the sum of |weight| of the models that agree, so a negative weight subtracts a model as in task_arithmetic. The
paper ranks the deltas of the whole model: `scope: model`, with `density: 0.2`.""",
    use="""For two to five fine-tunes of one base with different skills, with densities from 0.2 to 0.5. On language models,
trimming to a tenth or a fifth at full strength made merges worse than the base (https://arxiv.org/abs/2511.21437). Compare
with task_arithmetic, and check the distance from the base on the card.""",
    passes="""Two, up to four when the guess of a threshold fails; one with `density: 1`. With `scope: model` one more,
over all tensors, before the merge, and with `scope: row` one.""",
    source="Yadav et al. 2023, TIES-Merging, section 3, https://arxiv.org/abs/2306.01708; the default scope is mergekit's",
    formula="δᵢ = trim(Wᵢ - base);  s = sign(Σ wᵢδᵢ);  out = base + λ Σ_{agree} wᵢδᵢ / Σ_{agree} |wᵢ|",
    example=example_recipe("ties", per_model="{weight: 1.0, density: 0.5}"),
    needs=family.of_the_model,
    product=family.model_thresholds,
)
def ties(
    matrix: Matrix,
    weight: family.Share,
    density: family.Density = 1.0,
    scope: family.Scope = "tensor",
    normalize: family.NormalizeElected = True,
    rescale: family.Rescale = "none",
    lambda_: family.Lambda = 1.0,
    int8_mask: family.Int8Mask = False,
) -> Job:
    axes = family.Axes("magnitude", weight, lambda_, density, scope=scope, rescale=rescale, elect="sum")
    return family.job(matrix, axes, normalize=normalize)
