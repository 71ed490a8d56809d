"""tsv_m: the leading singular directions of each delta, kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsmith.jobs.decompose import polar, thin_svd
from weightsmith.jobs.job import Job, Matrix
from weightsmith.jobs.linears import needs_torch
from weightsmith.methods.base import Method, Parameter
from weightsmith.methods.family import LAMBDA
from weightsmith.methods.linears import WEIGHT, linears_job, number


def merge(deltas: Sequence[Any], directions: int | None, flatten: float = 0.0) -> Any:
    """U⊥ S V⊥ᵀ of the `directions` leading singular triples of each delta (None: a fair share of the rank).

    deltas   float64 [rows, cols] each; the result is of that shape
    flatten  moves the singular values kept of each delta towards their mean: (1 - flatten) S + flatten · mean S
    """
    import torch

    rank = min(deltas[0].shape)
    keep = min(rank, directions or max(1, rank // len(deltas)))
    parts = [thin_svd(d, keep) for d in deltas]
    u = polar(torch.cat([p[0] for p in parts], 1))
    v = polar(torch.cat([p[2] for p in parts], 0).T)
    return (u * torch.cat([_flat(p[1], flatten) for p in parts])) @ v.T


def _flat(s: Any, flatten: float) -> Any:
    return ((1.0 - flatten) * s + flatten * s.mean()) * (s > 0)


def _job(matrix: Matrix) -> Job:
    directions = matrix.shared["directions"]
    keep = None if directions is None else int(directions)
    flatten = number(matrix, "flatten")
    return linears_job(matrix, lambda deltas: merge(deltas, keep, flatten))


METHOD = Method(
    name="tsv_m",
    title="task singular vectors",
    summary="""For each weight of a linear layer the leading singular directions of every delta are kept, `directions` of
each; the left ones of all models are made orthogonal together, and so are the right ones, so that the models do not
write over each other; then they are added up. Few directions are the safer choice for fine-tunes whose deltas are of low
rank (LoRA), with `lambda` below 1; `flatten`, which is not in the paper, weakens the first of them in favour of the
others, as iso_c does for the sum. Embeddings, norms, biases and routers take the mean of the deltas. The evidence of the
paper is for vision models; on twelve full fine-tunes of language models, merged at default strength, it did worse than
the base (2511.21437), while task_arithmetic gained: compare the two on your own models. Takes torch.""",
    use="""Few directions of each model (8 to 32) and a lambda of 0.7 to 0.8 were the best on the testbed's small
language model. The published evidence is for vision models; on language models in the wild, at full rank and lambda
1, it was worse than the base (https://arxiv.org/abs/2511.21437).""",
    passes="Two: every matrix is read whole, decomposed, then written.",
    source="Gargiulo et al. 2024, Task Singular Vectors, section 4 (TSV-Merge), https://arxiv.org/abs/2412.00081",
    formula="wᵢδᵢ ≈ Uᵢ Sᵢ Vᵢᵀ (leading);  out = base + λ · polar([U₁ … U_N]) diag(S₁ … S_N) polar([V₁ … V_N])ᵀ",
    parameters=(
        WEIGHT,
        Parameter(
            "directions",
            "int",
            "Singular directions kept of each model's delta. Not given: the rank of the matrix shared out among the models.",
            minimum=1,
            optional=True,
        ),
        Parameter(
            "flatten",
            "float",
            "How far the singular values kept of one model are moved towards their mean: 0 not at all (the paper), 1 wholly.",
            default=0.0,
            minimum=0.0,
            maximum=1.0,
        ),
        LAMBDA,
    ),
    base="required",
    min_models=1,
    max_models=None,
    example="""merge_method: tsv_m
base_model: ./base
models:
  - model: ./fr
  - model: ./de
parameters: {directions: 8, lambda: 0.8}
dtype: bfloat16
""",
    job=_job,
    check=needs_torch,
)
