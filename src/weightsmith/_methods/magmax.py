"""magmax: the largest delta at each position."""

from __future__ import annotations

from weightsmith._methods import family
from weightsmith._methods.method import always, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="the largest delta at each position",
    family="sparse",
    summary="""Takes, at each position, the delta of the model that changed it most. Among equal deltas, the later model wins.
For models trained one after the other on different tasks.""",
    use="""For models fine-tuned one after the other. With unrelated skills, it adds up the largest changes of every model:
use a `lambda` below 1, or `norm_match`.""",
    passes="One: the result is written as the inputs are read.",
    source="Marczak et al. 2024, MagMax, section 4, https://arxiv.org/abs/2407.06322",
    formula="out = base + λ wₖδₖ,  k = argmaxᵢ |wᵢδᵢ|",
    example=example_recipe("magmax", shared="{lambda: 0.5}"),
    elementwise=always,
)
def magmax(matrix: Matrix, weight: family.Weight = 1.0, lambda_: family.Lambda = 1.0) -> Job:
    return family.job(matrix, family.Axes("none", weight, lambda_, combine="absmax"))
