"""The mean of xxᵀ of what enters a linear layer, over all tokens of the text: float32 [K, K]. RegMean's inner products.

The sum is that of `gram`. It is divided by the tokens of the text, not by those that reach the layer: an expert that few tokens
reach has small values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weightsmith._activations.statistics.gram import STATISTIC as GRAM


def _finish(total: Any, reached: int, tokens: int) -> Any:
    return GRAM.finish(total, reached, tokens).div_(tokens)


STATISTIC = replace(GRAM, finish=_finish)
