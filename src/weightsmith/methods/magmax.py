"""magmax: the largest delta of each position."""

from __future__ import annotations

from weightsmith.methods.base import Method, always
from weightsmith.methods.consensus_ta import WEIGHT
from weightsmith.methods.family import LAMBDA, task_vector_job

METHOD = Method(
    name="magmax",
    title="the largest delta of each position",
    summary="""At each position takes the delta of the model that changed it most, of equal ones the later model's.
For models trained one after the other on different tasks.""",
    use="""For models fine-tuned one after the other. With unrelated skills it adds up every model's largest changes:
use a `lambda` below 1, or `norm_match`.""",
    passes="One: the result is written as the inputs are read.",
    source="Marczak et al. 2024, MagMax, section 4, https://arxiv.org/abs/2407.06322",
    formula="out = base + λ wₖδₖ,  k = argmaxᵢ |wᵢδᵢ|",
    parameters=(WEIGHT, LAMBDA),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: magmax
base_model: ./base
models:
  - model: ./fr
  - model: ./de
parameters: {lambda: 0.5}
dtype: bfloat16
""",
    job=lambda matrix: task_vector_job(matrix, "none", combine="absmax"),
    elementwise=always,
)
