"""The interface of a statistic of a text: a sum or maximum over its tokens for each linear layer of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Statistic:
    """A sum over the tokens of a text, for a linear layer with a weight [N, K].

    shape      (N, K) → the shape of the sum, and of the array, which is float32
    add        (sum, part, x) adds what one row of the text gives to the rows `part` of the sum, in place. x: torch float32
               [tokens, K], what enters the layer for the tokens that reach it. Called from many threads, with other parts
    finish     (sum, reached, tokens) → the array: tokens that reached the layer, and of the text
    gradients  `add` gets also g, [tokens, N]: gradients of log p(label) at the outputs of the layer, summed over the labels
               of all tokens. Without gradients, layers with the same input share an array
    labels     of gradients: `drawn` from the model's own predictions, or the next tokens of the `text`
    precise    the sum is float64; else float32
    tile       rows of the sum that one thread adds; 0: all of them
    """

    shape: Callable[[int, int], tuple[int, ...]]
    add: Callable[..., None]
    finish: Callable[[Any, int, int], Any]
    gradients: bool = False
    labels: Literal["drawn", "text"] = "drawn"
    precise: bool = False
    tile: int = 0
