"""linear: the weighted average of checkpoints."""

from __future__ import annotations

from weightsmith.jobs.job import Job, Matrix
from weightsmith.methods.base import Method, Parameter, always
from weightsmith.methods.family import check_normalize

WEIGHT = Parameter("weight", "float", "Share of this model in the sum.", scope="model")


def _job(matrix: Matrix) -> Job:
    from weightsmith.jobs.combination import CombinationJob

    weights = matrix.weights()
    return CombinationJob(matrix, weights / weights.sum() if matrix.shared["normalize"] else weights)


METHOD = Method(
    name="linear",
    title="weighted average",
    summary="""The weighted average of two or more checkpoints: "model soups". Robust and cheap; use it for
checkpoints of one training run, or for fine-tunes of one base that do not disagree. Weights may be negative or sum to
anything with `normalize: false`. A base_model is an input like the others, and needs a weight of its own.""",
    use="""For checkpoints of one run, seeds of one fine-tune, and as the baseline that a cleverer method has to
beat. Not for fine-tunes of different bases, and weak when each model knows something else: everything is diluted.""",
    passes="One: the result is written as the inputs are read.",
    source="Wortsman et al. 2022, Model soups, https://arxiv.org/abs/2203.05482",
    formula="out = Σ wᵢ Wᵢ / Σ wᵢ   (without the division if normalize is false)",
    parameters=(WEIGHT, Parameter("normalize", "bool", "Divide by the sum of the weights.", default=True)),
    base="input",
    min_models=1,
    max_models=None,
    example="""merge_method: linear
models:
  - model: ./fr
    parameters: {weight: 0.6}
  - model: ./de
    parameters: {weight: 0.4}
dtype: bfloat16
""",
    job=_job,
    check=check_normalize,
    silent=lambda own: own["weight"] == 0,
    elementwise=always,
)
