"""Ways to compute router weights. `MODES` lists them; those that see prompts are functions of `prompt_gates`.

Statistics never include padding, so they do not depend on which prompts share a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Rows = npt.NDArray[np.float32]
"""float32 [layers, experts, hidden]: the routed experts' rows, then the shared experts' if they have any."""


@dataclass(frozen=True, slots=True)
class PromptSample:
    """One layer's input for the prompts of one expert: float32 [tokens, hidden] for each prompt."""

    positive: Sequence[Tensor]
    negative: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to compute router weights.

    make   file:function. Without prompts (`needs` is "nothing"): shape [layers, experts, hidden] and seed → Rows. With
           prompts: samples of all experts and the number of routed ones → float32 [experts, hidden] of one layer
    needs  what the samples are: embedding rows, the residual stream that enters the layer, or the input of its MLP
    plain  tokenise prompts as mergekit does: the text of the bos token, which counts as a token, followed by the prompt
    """

    make: str
    needs: Literal["nothing", "embedding", "entering", "mlp_input"] = "nothing"
    plain: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """The function that `make` names."""
        file, _, name = self.make.partition(":")
        return getattr(import_module(f"weightsmith._features.mixture.{file}"), name)


MODES: Mapping[str, Mode] = {
    "router_input": Mode("prompt_gates:discriminant", "mlp_input"),
    "hidden": Mode("prompt_gates:last", "entering", plain=True),
    "hidden_last": Mode("prompt_gates:last", "entering", plain=True),
    "hidden_avg": Mode("prompt_gates:average", "entering", plain=True),
    "cheap_embed": Mode("prompt_gates:summed", "embedding", plain=True),
    "random": Mode("gates:normal"),
    "uniform_random": Mode("gates:uniform"),
}
"""Every gate mode that recipes can name."""


# ---- random rows, for models that will be trained


def normal(shape: tuple[int, int, int], seed: int) -> Rows:
    """N(0, 1) entries, like mergekit's `random`. Logits are as large as the hidden state's norm, so one expert dominates."""
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, np.float32)


def uniform(shape: tuple[int, int, int], seed: int) -> Rows:
    """U(-1/√hidden, 1/√hidden) entries, like mergekit's `uniform_random` and torch's linear layers."""
    bound = np.float32(1 / math.sqrt(shape[2]))
    return np.random.Generator(np.random.PCG64(seed)).random(shape, np.float32) * (2 * bound) - bound
