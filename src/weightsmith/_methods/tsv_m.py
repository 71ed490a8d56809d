"""tsv_m: the leading singular directions of each delta, kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.jobs.decompose import flattened, polar, thin_svd
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.method import Bounds, example_recipe
from weightsmith.abc.job import Job, Matrix

if TYPE_CHECKING:
    from weightsmith._methods.jobs.matrix import Deltas


def merge(deltas: Sequence[Any], directions: int | None, flatten: float = 0.0) -> Any:
    """U⊥ S V⊥ᵀ of the `directions` leading singular triples of each delta (None: a fair share of the rank).

    deltas   float64 [rows, cols] each; the result is of that shape
    flatten  moves the singular values kept of each delta towards their mean: (1 - flatten) S + flatten · mean S
    """
    return _product(factors(deltas, directions, flatten), len(deltas[0]))


def _product(both: Any, rows: int) -> Any:
    return both[:rows] @ both[rows:].T


def factors(deltas: Sequence[Any], directions: int | None, flatten: float) -> Any:
    """U⊥ S and, below it, V⊥ of `merge`: float64 [rows + cols, directions of all deltas]."""
    import torch

    rank = min(deltas[0].shape)
    keep = min(rank, directions or max(1, rank // len(deltas)))
    parts = [thin_svd(d, keep) for d in deltas]
    u = polar(torch.cat([p[0] for p in parts], 1))
    v = polar(torch.cat([p[2] for p in parts], 0).T)
    return torch.cat([u * torch.cat([flattened(p[1], flatten) for p in parts]), v])


@matrix_method(
    title="task singular vectors",
    summary="""Keeps the leading singular directions of every delta, `directions` of each, for each weight of a linear layer.
The left directions of all models are made orthogonal together, and so are the right ones, so that the models do not overwrite
each other. Then they are added up. For fine-tunes with deltas of low rank (LoRA), few directions are the safer choice, with
`lambda` below 1. `flatten` is not in the paper: it weakens the first directions in favour of the others, as iso_c does for
the sum. Embeddings, norms, biases and routers take the mean of the deltas. The paper's evidence is for vision models. On
twelve full fine-tunes of language models, merged at default strength, it was worse than the base (2511.21437), while
task_arithmetic was better: compare the two on your models. Requires torch.""",
    use="""A few directions of each model (8 to 32) and a lambda of 0.7 to 0.8 were the best on the testbed's small language
model. The published evidence is for vision models; on language models in the wild, at full rank and lambda 1, it was worse
than the base (https://arxiv.org/abs/2511.21437).""",
    source="Gargiulo et al. 2024, Task Singular Vectors, section 4 (TSV-Merge), https://arxiv.org/abs/2412.00081",
    formula="wᵢδᵢ ≈ Uᵢ Sᵢ Vᵢᵀ (leading);  out = base + λ · polar([U₁ … U_N]) diag(S₁ … S_N) polar([V₁ … V_N])ᵀ",
    example=example_recipe("tsv_m", shared="{directions: 8, lambda: 0.8}"),
)
def tsv_m(
    matrix: Matrix,
    weight: Weight = 1.0,
    directions: Annotated[
        int | None,
        "Number of singular directions to keep of each delta. By default, the models share the rank of the matrix.",
        Bounds(1),
    ] = None,
    flatten: Annotated[
        float,
        "How far to move each model's kept singular values towards their mean: 0 not at all (the paper), 1 all the way.",
        Bounds(0.0, 1.0),
    ] = 0.0,
    lambda_: Lambda = 1.0,
) -> Job:
    rows, cols = matrix.size // max(matrix.cols, 1), matrix.cols
    if directions is None or len(weight) * directions * (rows + cols) >= matrix.size:
        return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, directions, flatten))

    def of_few(deltas: Deltas) -> Any:
        key = ("tsv_m", directions, flatten, deltas.weights)
        return _product(deltas.recall(key, lambda: factors(deltas, directions, flatten)), rows)

    from weightsmith._methods.jobs.matrix import MatrixJob

    job = linears_job(matrix, weight, lambda_, of_few)
    if isinstance(job, MatrixJob):
        job.identity = ""  # the factors are remembered, in a small part of the bytes of their product
    return job
