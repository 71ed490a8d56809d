"""wudi: the delta that interferes least with each model's own input space, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.method import Bounds, example_recipe
from weightsmith.abc.job import Job, Matrix


def merge(deltas: Sequence[Any], ridge: float) -> Any:
    """(Σ δᵢ Cᵢ)(Σ Cᵢ + ε I)⁻¹ with Cᵢ = δᵢᵀδᵢ / ‖δᵢ‖² and ε = ridge · the mean of the diagonal of Σ Cᵢ.

    deltas  float64 [rows, cols] each; a delta of zeros has no say

    Solves a system of the size of `cols`, or of all models' rows together where that is smaller: the same, for
    D (DᵀD + ε I)⁻¹ = (DDᵀ + ε I)⁻¹ D.
    """
    import torch

    norms = [float(torch.linalg.vector_norm(d)) for d in deltas]
    used = [i for i, norm in enumerate(norms) if norm > 0]
    rows, cols = deltas[0].shape
    if not used:
        return torch.zeros_like(deltas[0])
    epsilon = ridge * len(used) / cols  # each Cᵢ has a trace of 1
    if cols <= len(used) * rows:
        grams, target = deltas[0].new_zeros(cols, cols), deltas[0].new_zeros(rows, cols)
        for i in used:
            delta = deltas[i]
            gram = delta.T @ delta / norms[i] ** 2
            target += delta @ gram
            grams += gram
        grams.diagonal().add_(epsilon)
        return torch.cholesky_solve(target.T, torch.linalg.cholesky(grams)).T
    stacked = torch.cat([deltas[i] / norms[i] for i in used])
    projected = torch.cat([deltas[i] @ deltas[i].T / norms[i] for i in used], 1)
    kernel = stacked @ stacked.T
    kernel.diagonal().add_(epsilon)
    return projected @ torch.cholesky_solve(stacked, torch.linalg.cholesky(kernel))


@matrix_method(
    title="least interference with the rows of each delta",
    summary="""Finds the merged delta that does what each model's own delta does, in the directions in which that model moved.
The method uses the rows of a delta in place of the layer's inputs. It computes the exact minimum of the paper's loss, with a
`ridge`, in closed form. The published result is different: 300 steps of Adam from the sum of the deltas reach a point that
depends on the scale of the deltas, well before the minimum. The length of the minimum depends on the deltas. At the default
ridge, three deltas of low rank in different directions keep the length of their sum. Three unrelated dense square ones came
out at 0.58 of it, and three equal ones at 0.31, which is their mean. So start with a `lambda` below 1 for LoRA fine-tunes, and
with 1 for others. Embeddings, norms, biases and routers take the mean of the deltas; the authors' code for vision models
merges only attention and MLP weights. The paper's numbers for language models are for Llama-2 and Qwen-14B, and are those of
the 300 steps. Requires torch.""",
    use="""For fine-tunes of one base. The authors' results, among the best without data on 13 B models, are those of 300 Adam
steps, not of this closed form. Tune `ridge` and `lambda`.""",
    source="Cheng et al. 2025, Whoever Started the Interference Should End It (WUDI-Merging), equation of the loss, "
    "https://arxiv.org/abs/2503.08099; solved as RegMean's, Jin et al. 2022, https://arxiv.org/abs/2212.09849",
    formula="Cᵢ = δᵢᵀδᵢ / ‖δᵢ‖²;  out = base + λ (Σ wᵢδᵢCᵢ)(Σ Cᵢ + ε I)⁻¹,  ε = ridge · mean diag(Σ Cᵢ)",
    example=example_recipe("wudi", shared="{ridge: 0.1, lambda: 0.7}"),
)
def wudi(
    matrix: Matrix,
    weight: Weight = 1.0,
    ridge: Annotated[float, "Of the mean of the diagonal. Larger is nearer to a mean by energy.", Bounds(1e-6)] = 0.1,
    lambda_: Lambda = 1.0,
) -> Job:
    side = min(matrix.cols, (len(matrix.codes) - 1) * matrix.size // max(matrix.cols, 1))
    copies = 2 * len(matrix.codes) + 4
    return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, ridge), side=side, copies=copies)
