"""consensus_ta: task arithmetic, only where enough models contribute."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from weightsmith._methods.describe import example_recipe
from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.signature import Bounds, PerModel, always, merge_method
from weightsmith.abc.job import Job, Matrix


@merge_method(
    title="task arithmetic, only where enough models contribute",
    summary="""Keeps a position of the summed task vector only where at least `k` models stand out of the rest of the
sum: positions that matter to one model alone, or to none, keep the base. `k: 0` is task arithmetic, `k: 1` drops what
matters to none. No statistics: as quick as task arithmetic. λ is about 0.3 to 0.4 for eight vision models; on the
language models of the testbed it was behind task arithmetic.""",
    use="""For many models (eight and more) of which each changes much that matters to nobody else. With two or three
models `k: 2` keeps too little; use task_arithmetic.""",
    passes="One: the result is written as the inputs are read.",
    source="Wang et al. 2024, Localizing Task Information (TALL-masks), section 5, https://arxiv.org/abs/2405.07813",
    formula="Δ = Σ wᵢδᵢ;  mᵢ = |wᵢδᵢ| > thresholdᵢ · |Δ - wᵢδᵢ|;  out = base + λ Δ where Σ mᵢ ≥ k",
    example=example_recipe("consensus_ta", each="{threshold: 0.4}", shared="{k: 2, lambda: 0.7}"),
    elementwise=always,
)
def consensus_ta(
    matrix: Matrix,
    weight: Weight = 1.0,
    threshold: Annotated[PerModel[float], "How far a model must stand out of the others.", Bounds(0.0)] = 0.4,
    k: Annotated[int, "Models that must stand out.", Bounds(0)] = 2,
    lambda_: Lambda = 1.0,
) -> Job:
    from weightsmith._kernels.elementwise import Consensus, merge_consensus
    from weightsmith._methods.jobs.elementwise import ElementwiseJob

    return ElementwiseJob(matrix, merge_consensus, weight, Consensus(np.asarray(threshold), k), lambda_)
