"""mergekit's `cheap_embed`: router weights from the embedding, the same in all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from weightsmith._features.mixture.routing.gates import Sample
from weightsmith._features.mixture.routing.gates.hidden import unit_rows


def summed(samples: Sequence[Sample], routed: int) -> Tensor:
    """Sum an expert's prompt embeddings over all tokens, normalise, subtract the negative prompts', normalise again.

    Does not run the model. After the first layers, a router's inputs no longer lie in the directions of the embedding.
    """
    return unit_rows(samples, _direction)


def _direction(prompts: Sequence[Tensor]) -> Tensor:
    return normalize(torch.cat(list(prompts)).double().sum(0), dim=0, eps=1e-8)
