"""resmerge: the deltas without their leading direction averaged on the sphere, and the leading ones added with care."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from weightsmith._base.torch_use import needs_torch
from weightsmith._methods.family import Lambda, Weight
from weightsmith._methods.jobs.decompose import thin_svd
from weightsmith._methods.linears import linears_job, matrix_method
from weightsmith._methods.method import Bounds, example_recipe
from weightsmith.abc.job import Job, Matrix


def _norm(a: Any) -> float:
    return math.sqrt(float((a * a).sum()))


def _units(parts: Sequence[Any]) -> list[Any]:
    """The parts that are not zero, each divided by its norm."""
    return [part / _norm(part) for part in parts if _norm(part) > 0]


def _cosines(units: Sequence[Any]) -> list[float]:
    """The cosine of each pair."""
    return [float((a * b).sum()) for i, a in enumerate(units) for b in units[i + 1 :]]


def backbone(residuals: Sequence[Any], beta_min: float, beta_max: float) -> Any:
    """The residuals' common direction, as long as they are on average times coherence^β; their mean where they do not cohere.

    residuals  float64 [rows, cols] each

    The coherence c is the mean cosine of residual and common direction, β goes from beta_max to beta_min as c and the mean
    pairwise cosine s grow: by ((s + 1)/2 + (c + 1)/2) / 2. N random directions have a coherence of 1/√N.
    """
    count = len(residuals)
    mean = sum(residuals) / count
    units = _units(residuals)
    direction = sum(units)
    length = _norm(direction) if units else 0.0
    if length == 0:
        return mean
    coherence = min(1.0, length / count)  # Σ ⟨uᵢ, q⟩ = ‖Σ uᵢ‖
    if coherence <= 1.0 / math.sqrt(count):
        return mean
    pairs = count * (count - 1) // 2
    agreement = sum(_cosines(units)) / pairs if pairs else 1.0
    score = 0.5 * ((agreement + 1.0) / 2.0 + (coherence + 1.0) / 2.0)
    beta = beta_max - (beta_max - beta_min) * score
    size = sum(_norm(r) for r in residuals) / count
    return direction * (size * coherence**beta / length)


def merge(deltas: Sequence[Any], head_rank: int, head_share: float, beta_min: float, beta_max: float) -> Any:
    """The residuals' backbone plus the mean of the heads, at `head_share` · agreement of the heads · the backbone's norm.

    deltas  float64 [rows, cols] each; the result is of that shape
    """
    heads, residuals = [], []
    for i in range(len(deltas)):
        u, s, vt = thin_svd(deltas[i], head_rank)
        heads.append((u * s) @ vt)
        residuals.append(deltas[i] - heads[-1])
    merged = backbone(residuals, beta_min, beta_max)
    units = _units(heads)
    cosines = [max(0.0, c) for c in _cosines(units)]
    agreement = sum(cosines) / len(cosines) if cosines else float(bool(units))
    mean = sum(heads) / len(heads)
    length = _norm(mean)
    return merged + mean * (head_share * agreement * _norm(merged) / length) if length > 0 else merged


def _check(beta_min: float, beta_max: float) -> str:
    return f"beta_min {beta_min:g} is above beta_max {beta_max:g}" if beta_min > beta_max else needs_torch()


@matrix_method(
    title="residual merge for reinforcement-learned experts",
    summary="""Splits each delta into its leading singular directions (the head, of rank `head_rank`) and a residual. The
residuals are averaged as directions, so that disagreement does not shorten the result. The heads are added at a small share
of that length, which shrinks as they disagree. Made for experts from reinforcement learning, whose deltas are spread out and
nearly orthogonal, and published for Qwen2.5-7B and Qwen3-4B. Do not use it for LoRA fine-tunes of low rank: their deltas are
mostly head, and little would be left. Embeddings, norms, biases and routers take the mean of the deltas; the authors' code
also decomposes the router weights of a mixture. Requires torch.""",
    use="For models trained by reinforcement learning from one base, whose deltas have one strong common direction each.",
    source="Sun et al. 2026, ResMerge: Residual-based Spectral Merging of Large Language Models, "
    "https://arxiv.org/abs/2606.02252, and the authors' code for the exponent",
    formula="wᵢδᵢ = Hᵢ + Rᵢ;  q = Σ Rᵢ/‖Rᵢ‖ normalised;  c = mean cos(Rᵢ, q);  B = q · mean ‖Rᵢ‖ · c^β;  "
    "out = base + λ (B + head_share · mean cos⁺(Hᵢ, Hⱼ) · ‖B‖ · H̄/‖H̄‖)",
    example=example_recipe("resmerge"),
    check=_check,
)
def resmerge(
    matrix: Matrix,
    weight: Weight = 1.0,
    head_rank: Annotated[int, "Leading singular directions that are the head.", Bounds(1)] = 1,
    head_share: Annotated[float, "Length of the heads' part over that of the rest, when all heads agree.", Bounds(0.0)] = 0.2,
    beta_min: Annotated[float, "Exponent of the coherence when all residuals agree.", Bounds(0.0)] = 0.7,
    beta_max: Annotated[float, "Exponent of the coherence when they oppose each other.", Bounds(0.0)] = 1.0,
    lambda_: Lambda = 1.0,
) -> Job:
    how = head_rank, head_share, beta_min, beta_max
    return linears_job(matrix, weight, lambda_, lambda deltas: merge(deltas, *how), copies=4 * len(matrix.codes) + 4)
