"""cart: the average, and the leading singular directions of what each model has beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from weightsmith._methods.family import Lambda
from weightsmith._methods.jobs.decompose import thin_svd
from weightsmith._methods.linears import matrix_method
from weightsmith._methods.method import Bounds, example_recipe
from weightsmith.abc.job import Job, Matrix


def merge(deltas: Sequence[Any], rank: float) -> Any:
    """The sum of the deltas, each cut to ⌊rank · shorter side⌋ leading singular directions (at least one).

    deltas  float64 [rows, cols] each: inputs minus their mean
    """
    keep = max(1, int(rank * min(deltas[0].shape)))
    return sum((u * s) @ vt for u, s, vt in (thin_svd(delta, keep) for delta in deltas))


@matrix_method(
    title="centred task vectors of low rank",
    summary="""Takes each model's difference from the average of all, cuts it to its leading singular directions, and
adds these to the average: `rank` is the share of the directions that is kept. With `rank: 1` the differences cancel and
the average is left. It needs no base; a base_model is an input like the others. Embeddings, norms, biases and routers are
averaged. Published for vision models and a few language tasks, with a rank of 0.04 to 0.08 and `lambda` tuned on held-out
data; no evidence for large language models is known. Requires torch.""",
    use="""When there is no common base to subtract, or to pull a plain average towards each model's strongest
directions. The evidence is for vision models.""",
    source="Choi et al. 2024, Revisiting Weight Averaging for Model Merging (CART), https://arxiv.org/abs/2412.12153",
    formula="W̄ = Σ Wᵢ / N;  out = W̄ + λ Σ SVD_k(Wᵢ - W̄),  k = ⌊rank · min(rows, cols)⌋",
    base="input",
    min_models=2,
    example=example_recipe("cart", shared="{rank: 0.04, lambda: 1.0}", base=""),
)
def cart(
    matrix: Matrix,
    rank: Annotated[float, "Share of the singular directions kept of each model.", Bounds(0.0, 1.0)] = 0.04,
    lambda_: Lambda = 1.0,
) -> Job:
    from weightsmith._methods.jobs.combination import CombinationJob
    from weightsmith._methods.jobs.matrix import MatrixJob

    models = len(matrix.codes)
    even = np.full(models, 1.0 / models)
    if matrix.role != "linear":
        return CombinationJob(matrix, even)
    return MatrixJob(matrix, lambda deltas: merge(deltas, rank), even, np.ones(models), lambda_, origin="mean")
