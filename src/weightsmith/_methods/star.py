"""star: the mean of deltas cut to their leading singular directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from weightsmith._methods.describe import example_recipe
from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.jobs.decompose import thin_svd
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.signature import Bounds, PerModel
from weightsmith.abc.job import Job, Matrix


def truncate(delta: Any, eta: float, known_rank: int | None = None) -> Any:
    """A delta's fewest leading directions with the share η of the sum of its singular values, scaled up to all of it.

    known_rank  the sum is that of so many leading singular values; None: of all
    """
    import torch

    u, s, vt = thin_svd(delta, known_rank)
    sums = torch.cumsum(s, 0)
    if sums[-1] == 0:
        return delta
    k = int(torch.searchsorted(sums, eta * sums[-1])) + 1
    return (u[:, :k] * (s[:k] * (sums[-1] / sums[k - 1]))) @ vt[:k]


def merge(deltas: Sequence[Any], eta: float, known_rank: Sequence[int | None]) -> Any:
    """The mean of the truncated deltas."""
    return sum(truncate(deltas[i], eta, rank) for i, rank in enumerate(known_rank)) / len(deltas)


@matrix_method(
    title="spectral truncation and rescale",
    summary="""Of each delta's singular directions the leading ones are kept, as few as hold the share `eta` of the sum
of its singular values, and are scaled up so that the sum is what it was; then the models are averaged. The spectral
counterpart of ties' trimming, without an election. For LoRA fine-tunes give the rank of the adapters as `known_rank`:
what lies beyond it is the rounding of the weights, which otherwise counts in the sum and goes to the directions that are
kept. Embeddings, norms, biases and routers take the mean of the deltas. Published for Flan-T5, Mistral and Llama-3
fine-tunes, with modest gains over ties. Takes torch.""",
    use="""For deltas whose singular values fall quickly. Rescaling lengthens the directions that are kept (a random delta
of rank 8 came out twice as long at the default `eta`), so begin with a low `lambda`. A LoRA delta stored in bf16 without
`known_rank` is the worst case: on the testbed its perplexity was 16.96 where the base has 13.26, and 11.03 with the rank.
Tested by its authors on Flan-T5, Mistral and Llama-3B.""",
    source="Lee et al. 2025, STAR: Spectral Truncation and Rescale for Model Merging, section 3, "
    "https://arxiv.org/abs/2502.10339; `known_rank` as in the authors' code",
    formula="out = base + λ/N Σ (sum Sᵢ / sum Kᵢ) Uᵢ diag(Kᵢ) Vᵢᵀ,  wᵢδᵢ = Uᵢ diag(Sᵢ) Vᵢᵀ, Kᵢ the leading part of Sᵢ",
    example=example_recipe("star", shared="{eta: 0.4, known_rank: 16}"),
)
def star(
    matrix: Matrix,
    weight: Weight = 1.0,
    eta: Annotated[float, "Share of the sum of singular values that the kept directions must reach.", Bounds(0.0, 1.0)] = 0.4,
    known_rank: Annotated[
        PerModel[int | None],
        "Rank of this model's deltas, where it is known: the r of a LoRA fine-tune. Singular values beyond it are rounding "
        "noise and do not count. Not given: all count.",
        Bounds(1),
    ] = None,
    lambda_: Lambda = 1.0,
) -> Job:
    return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, eta, known_rank))
