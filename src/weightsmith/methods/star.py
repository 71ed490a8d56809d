"""star: the mean of deltas cut to their leading singular directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from weightsmith.jobs.decompose import thin_svd
from weightsmith.jobs.job import Job, Matrix
from weightsmith.methods.family import Lambda, Weight
from weightsmith.methods.linears import linears_job, matrix_method
from weightsmith.methods.signature import Bounds


def truncate(delta: Any, eta: float) -> Any:
    """A delta's fewest leading directions with the share η of the sum of its singular values, scaled up to all of it."""
    import torch

    u, s, vt = thin_svd(delta)
    sums = torch.cumsum(s, 0)
    if sums[-1] == 0:
        return delta
    k = int(torch.searchsorted(sums, eta * sums[-1])) + 1
    return (u[:, :k] * (s[:k] * (sums[-1] / sums[k - 1]))) @ vt[:k]


def merge(deltas: Sequence[Any], eta: float) -> Any:
    """The mean of the truncated deltas."""
    total = truncate(deltas[0], eta)
    for i in range(1, len(deltas)):
        total = total + truncate(deltas[i], eta)
    return total / len(deltas)


@matrix_method(
    title="spectral truncation and rescale",
    summary="""Of each delta's singular directions the leading ones are kept, as few as hold the share `eta` of the sum
of its singular values, and are scaled up so that the sum is what it was; then the models are averaged. The spectral
counterpart of ties' trimming, without an election. Embeddings, norms, biases and routers take the mean of the deltas. Published
for Flan-T5, Mistral and Llama-3 fine-tunes, with modest gains over ties. Takes torch.""",
    use="For deltas with noise in their small singular values. Tested by its authors on Flan-T5, Mistral and Llama-3B.",
    source="Lee et al. 2025, STAR: Spectral Truncation and Rescale for Model Merging, section 3, https://arxiv.org/abs/2502.10339",
    formula="out = base + λ/N Σ (sum Sᵢ / sum Kᵢ) Uᵢ diag(Kᵢ) Vᵢᵀ,  wᵢδᵢ = Uᵢ diag(Sᵢ) Vᵢᵀ, Kᵢ the leading part of Sᵢ",
    example="""merge_method: star
base_model: ./base
models:
  - model: ./fr
  - model: ./de
parameters: {eta: 0.4, lambda: 1.5}
dtype: bfloat16
""",
)
def star(
    matrix: Matrix,
    weight: Weight = 1.0,
    eta: Annotated[float, "Share of the sum of singular values that the kept directions must reach.", Bounds(0.0, 1.0)] = 0.4,
    lambda_: Lambda = 1.0,
) -> Job:
    return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, eta))
