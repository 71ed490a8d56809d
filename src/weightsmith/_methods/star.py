"""star: the mean of deltas cut to their leading singular directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.jobs.decompose import thin_svd
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.method import Bounds, PerModel, example_recipe
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
    summary="""Keeps the leading singular directions of each delta: as few as reach the share `eta` of the sum of its singular
values. Scales them up to restore the sum, then averages the models. It is the spectral counterpart of TIES' trimming, without
an election. For LoRA fine-tunes, set `known_rank` to the rank of the adapters. Values beyond it are rounding noise, which
would otherwise count in the sum and strengthen the kept directions. Embeddings, norms, biases and routers take the mean of
the deltas. Published for Flan-T5, Mistral and Llama-3 fine-tunes, with modest gains over ties. Requires torch.""",
    use="""For deltas whose singular values fall quickly. Rescaling lengthens the directions that are kept: a random delta of
rank 8 came out twice as long at the default `eta`. So start with a low `lambda`. The worst case is a LoRA delta stored in
bf16 without `known_rank`: on the testbed its perplexity was 16.96, against 13.26 for the base, and 11.03 with the rank. The
authors tested Flan-T5, Mistral and Llama-3B.""",
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
        "noise and do not count. By default, all count.",
        Bounds(1),
    ] = None,
    lambda_: Lambda = 1.0,
) -> Job:
    return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, eta, known_rank))
