"""mergekit's `hidden` modes: an expert's row is the mean of the residual stream before the layer over its prompts, norm 1.

That is not what a router receives: attention and a norm come between. The modes are here so that recipes mean what they meant.
Unlike mergekit's, the mean of `hidden_avg` counts no padding: there a prompt that shares a batch with a longer one is blended
with padding tokens, and the longest prompt of an expert decides over the others' rows. Prompts of one length give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weightsmith.mixture.routing.gates import Sample


def last(samples: Sequence[Sample], routed: int) -> Tensor:
    """`hidden` and `hidden_last`: the last token of each prompt, mean over prompts; negative ones subtracted; norm 1."""
    return _unit_rows(samples, lambda prompt: prompt[-1])


def average(samples: Sequence[Sample], routed: int) -> Tensor:
    """`hidden_avg`: the mean over the tokens of each prompt, then over prompts; negative ones subtracted; norm 1."""
    return _unit_rows(samples, lambda prompt: prompt.mean(0))


def _unit_rows(samples: Sequence[Sample], statistic: Callable[[Tensor], Tensor]) -> Tensor:
    width = next(s.positive[0].shape[1] for s in samples if s.positive)
    rows = torch.zeros(len(samples), width, dtype=torch.float64)
    for row, sample in zip(rows, samples, strict=True):
        if sample.positive:
            row += torch.stack([statistic(prompt.double()) for prompt in sample.positive]).mean(0).cpu()
        if sample.negative:
            row -= torch.stack([statistic(prompt.double()) for prompt in sample.negative]).mean(0).cpu()
    return torch.nn.functional.normalize(rows, dim=1, eps=1e-8)
