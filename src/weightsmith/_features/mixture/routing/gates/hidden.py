"""mergekit's modes that see prompts. `hidden`: a row is the mean residual stream before the layer, with norm 1.

A router's input differs: attention and a norm come in between. These modes exist for compatibility with recipes. Unlike
mergekit's, the mean of `hidden_avg` excludes padding. mergekit blends shorter prompts of a batch with padding tokens, so the
longest prompt of an expert affects the means of its others. With prompts of equal length both give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from weightsmith._features.mixture.routing.gates import PromptSample


def last(samples: Sequence[PromptSample], routed: int) -> Tensor:
    """`hidden`, `hidden_last`: the mean over prompts of the last token, minus that of negative prompts; norm 1."""
    return _unit_rows(samples, _mean_of(lambda prompt: prompt[-1]))


def average(samples: Sequence[PromptSample], routed: int) -> Tensor:
    """`hidden_avg`: the mean over tokens, then over prompts, minus that of negative prompts; norm 1."""
    return _unit_rows(samples, _mean_of(lambda prompt: prompt.mean(0)))


def _mean_of(statistic: Callable[[Tensor], Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
    return lambda prompts: torch.stack([statistic(prompt.double()) for prompt in prompts]).mean(0)


def _unit_rows(samples: Sequence[PromptSample], direction: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    """The direction of each expert's prompts minus that of its negative ones, with norm 1: float64 [experts, hidden]."""
    width = next(s.positive[0].shape[1] for s in samples if s.positive)
    rows = torch.zeros(len(samples), width, dtype=torch.float64)
    for row, sample in zip(rows, samples, strict=True):
        if sample.positive:
            row += direction(sample.positive).cpu()
        if sample.negative:
            row -= direction(sample.negative).cpu()
    return normalize(rows, dim=1, eps=1e-8)


def summed(samples: Sequence[PromptSample], routed: int) -> Tensor:
    """`cheap_embed`: the sum of an expert's prompt embeddings over all tokens, minus that of negative prompts; norm 1.

    Both sums have norm 1. Does not run the model, so the rows are the same in all layers. After the first layers, a router's
    inputs no longer lie in the directions of the embedding.
    """
    return _unit_rows(samples, lambda prompts: normalize(torch.cat(list(prompts)).double().sum(0), dim=0, eps=1e-8))
