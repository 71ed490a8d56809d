"""consensus_ta: task arithmetic where enough models matter."""

from __future__ import annotations

from weightsmith.jobs.job import Job, Matrix
from weightsmith.methods.base import Method, Parameter, always
from weightsmith.methods.family import LAMBDA


def _job(matrix: Matrix) -> Job:
    from weightsmith.jobs.elementwise import ElementwiseJob
    from weightsmith.kernels.elementwise import merge_consensus

    votes, factor = int(matrix.shared["k"] or 0), float(matrix.shared["lambda"])  # type: ignore[arg-type]
    return ElementwiseJob(matrix, merge_consensus, matrix.weights(), matrix.weights("threshold"), votes, factor)


WEIGHT = Parameter("weight", "float", "Factor on this model's delta.", scope="model", default=1.0)


METHOD = Method(
    name="consensus_ta",
    title="task arithmetic where enough models matter",
    summary="""Keeps a position of the summed task vector only where at least `k` models stand out of the rest of the
sum: positions that matter to one model alone, or to none, keep the base. `k: 0` is task arithmetic, `k: 1` drops what
matters to none. No statistics: as quick as task arithmetic. λ is about 0.3 to 0.4 for eight vision models; on the
language models of the testbed it was behind task arithmetic.""",
    use="""For many models (eight and more) of which each changes much that matters to nobody else. With two or three
models `k: 2` keeps too little; use task_arithmetic.""",
    passes="One: the result is written as the inputs are read.",
    source="Wang et al. 2024, Localizing Task Information (TALL-masks), section 5, https://arxiv.org/abs/2405.07813",
    formula="Δ = Σ wᵢδᵢ;  mᵢ = |wᵢδᵢ| > thresholdᵢ · |Δ - wᵢδᵢ|;  out = base + λ Δ where Σ mᵢ ≥ k",
    parameters=(
        WEIGHT,
        Parameter(
            "threshold", "float", "How far a model must stand out of the others.", scope="model", default=0.4, minimum=0.0
        ),
        Parameter("k", "int", "Models that must stand out.", default=2, minimum=0),
        LAMBDA,
    ),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: consensus_ta
base_model: ./base
models:
  - model: ./fr
    parameters: {threshold: 0.4}
  - model: ./de
    parameters: {threshold: 0.4}
parameters: {k: 2, lambda: 0.7}
dtype: bfloat16
""",
    job=_job,
    elementwise=always,
)
