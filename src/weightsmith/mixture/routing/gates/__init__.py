"""Router weights. Each way to make them is one file with a function that makes rows; `MODES` names them.

Statistics are of real tokens alone: padding is never counted, whatever prompts share a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Rows = npt.NDArray[np.float32]
"""float32 [layers, experts, hidden]: the routed experts' rows, then those of shared experts that have one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one layer sees of the prompts of one expert: float32 [tokens, hidden], one for each prompt."""

    positive: Sequence[Tensor]
    negative: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to make router weights.

    make   file:function. Without prompts (`needs` is "nothing"): shape [layers, experts, hidden] and seed → Rows. With: the
           samples of all experts, and how many of them are routed → float32 [experts, hidden] of one layer
    needs  what the samples are: the rows of the embedding, the residual stream that enters the layer, or the input of its MLP
    plain  prompts are tokenised as mergekit does: the bos token's text and the prompt, and it counts as a token
    """

    make: str
    needs: Literal["nothing", "embedding", "entering", "mlp_input"] = "nothing"
    plain: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """The function that makes rows."""
        file, _, name = self.make.partition(":")
        function: Callable[..., Any] = getattr(import_module(f"weightsmith.mixture.routing.gates.{file}"), name)
        return function


MODES: Mapping[str, Mode] = {
    "router_input": Mode("router_input:discriminant", "mlp_input"),
    "hidden": Mode("hidden:last", "entering", plain=True),
    "hidden_last": Mode("hidden:last", "entering", plain=True),
    "hidden_avg": Mode("hidden:average", "entering", plain=True),
    "cheap_embed": Mode("cheap_embed:summed", "embedding", plain=True),
    "random": Mode("random:normal"),
    "uniform_random": Mode("random:uniform"),
}
"""Every gate mode of the grammar."""
