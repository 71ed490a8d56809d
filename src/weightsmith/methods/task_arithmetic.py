"""task_arithmetic: add weighted differences from a base."""

from __future__ import annotations

import numpy as np

from weightsmith.jobs.job import Job, Matrix
from weightsmith.methods.base import Method, Parameter, always
from weightsmith.methods.family import INT8_MASK, LAMBDA, check_normalize, normalize
from weightsmith.methods.linear import WEIGHT


def _job(matrix: Matrix) -> Job:
    from weightsmith.jobs.combination import CombinationJob

    weights = matrix.weights()
    factor = float(matrix.shared["lambda"])  # type: ignore[arg-type]
    if matrix.shared["normalize"]:
        total = float(weights.sum())
        factor /= total if abs(total) >= 1e-8 else 1.0
    # base + λ Σ wᵢ (Wᵢ - base) is a linear combination of the inputs; float64 sums keep it exact enough.
    return CombinationJob(matrix, np.concatenate([[1.0 - factor * weights.sum()], factor * weights]))


METHOD = Method(
    name="task_arithmetic",
    title="sum of task vectors",
    summary="""Adds the weighted task vectors (fine-tune minus base) of any number of fine-tunes to their base. A
negative weight removes what a fine-tune learnt; a weight above 1 extrapolates. Of all methods it is the one that most
reliably improves on the base for language models; `lambda` scales the sum and is the parameter to tune.""",
    use="""The first method to try for fine-tunes of one base: the only one that reliably improved on the base over
many language models in the wild (https://arxiv.org/abs/2511.21437). Start with weights that sum to about 1, and tune
`lambda`. Not without the common base.""",
    passes="One: the result is written as the inputs are read.",
    source="Ilharco et al. 2022, Editing models with task arithmetic, https://arxiv.org/abs/2212.04089",
    formula="out = base + λ Σ wᵢ (Wᵢ - base)   (divided by Σ wᵢ if normalize)",
    parameters=(
        WEIGHT,
        Parameter("density", "float", "Not used.", scope="model", default=1.0, ignored="task_arithmetic has no sparsifier"),
        normalize(False),
        Parameter("rescale", "bool", "Not used.", default=False, ignored="there is no sparsifier to make up for"),
        LAMBDA,
        INT8_MASK,
    ),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: task_arithmetic
base_model: ./base
models:
  - model: ./fr
    parameters: {weight: 0.6}
  - model: ./de
    parameters: {weight: 0.6}
dtype: bfloat16
""",
    job=_job,
    check=check_normalize,
    elementwise=always,
)
