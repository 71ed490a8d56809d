"""add_noise: one model, with normal noise on its weights."""

from __future__ import annotations

from typing import Annotated

from weightsmith._methods.method import Bounds, example_recipe, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="add random noise to the weights of one model",
    family="copy",
    summary="""Adds a normal random number to every weight. This is `plus random` of SuperMerger, for image models. The noise
depends only on the seed (`--seed`), the name of the tensor and the position of the weight, so a run can be repeated. Filters
give tensors noise of their own: `deviation: [{filter: attn, value: 0.001}, {value: 0}]`. As in SuperMerger, only tensors
with `weight` or `bias` in their names get noise. Others stay as they are, such as the noise schedule of a diffusion model
(`alphas_cumprod`, `betas`) and the counters of EMA.""",
    use="""To see how much change a model bears, or to vary images. Compare `deviation` with the size of the weights: a
hundredth of their standard deviation changes little. SuperMerger leaves tensors alone that have `to_out`, `proj_out` or
`norm` in their names.""",
    passes="One: the result is written as the input is read.",
    source="hako-mikan, SuperMerger, plus random, https://github.com/hako-mikan/sd-webui-supermerger",
    formula="out = W + deviation · N(0, 1)",
    base="input",
    max_models=1,
    example=example_recipe("add_noise", shared="{deviation: 0.001}", models=["fr"], base=""),
)
def add_noise(
    matrix: Matrix,
    deviation: Annotated[float, "Standard deviation of the noise; 0 leaves the tensor as it is.", Bounds(0.0)],
) -> Job:
    from weightsmith._methods.jobs.operations import NoiseJob

    trained = "weight" in matrix.name or "bias" in matrix.name
    return NoiseJob(matrix, deviation if trained else 0.0)
