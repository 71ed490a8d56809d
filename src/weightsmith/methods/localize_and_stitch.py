"""localize_and_stitch: each model's largest deltas of the whole model, averaged where they meet."""

from __future__ import annotations

from dataclasses import replace

from weightsmith.methods.base import Method
from weightsmith.methods.consensus_ta import WEIGHT
from weightsmith.methods.family import DENSITY, LAMBDA, SCOPE, model_thresholds, task_vector_job

METHOD = Method(
    name="localize_and_stitch",
    title="each model's largest deltas of the whole model, averaged where they meet",
    summary="""Keeps the largest share `density` of each model's deltas, ranked over all its tensors, adds them to the
base, and averages where those of several models meet: no election. This is the authors' method without data
("dataless"); with data they find the positions by training. Among the best of the methods without data in MergeBench
(2 to 9 B language models). Takes a pass over all tensors before the merge.""",
    use="""For several specialised models, from 5 to 10 % of each. Little is changed, so little is forgotten. Not for
one model alone: it only weakens it.""",
    passes="One over all tensors, and a sample of them, then the result.",
    source="He et al. 2024, Localize-and-Stitch, section 3, https://arxiv.org/abs/2408.13656",
    formula="δᵢ = the density · N largest of model i;  out = base + λ Σ wᵢδᵢ / (number of models with a δᵢ there)",
    parameters=(WEIGHT, replace(DENSITY, default=0.1), replace(SCOPE, default="model"), LAMBDA),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: localize_and_stitch
base_model: ./base
models:
  - model: ./fr
    parameters: {density: 0.1}
  - model: ./de
    parameters: {density: 0.1}
dtype: bfloat16
""",
    job=lambda matrix: task_vector_job(matrix, "magnitude", combine="disjoint_mean"),
    survey=model_thresholds,
)
