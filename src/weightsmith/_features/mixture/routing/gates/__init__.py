"""Ways to compute router weights: one file each, with a function that returns rows. `MODES` lists them.

Statistics never include padding, so they do not depend on which prompts share a batch.
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
        function: Callable[..., Any] = getattr(import_module(f"weightsmith._features.mixture.routing.gates.{file}"), name)
        return function


MODES: Mapping[str, Mode] = {
    "router_input": Mode("router_input:discriminant", "mlp_input"),
    "hidden": Mode("hidden:last", "entering", plain=True),
    "hidden_last": Mode("hidden:last", "entering", plain=True),
    "hidden_avg": Mode("hidden:average", "entering", plain=True),
    "cheap_embed": Mode("hidden:summed", "embedding", plain=True),
    "random": Mode("random:normal"),
    "uniform_random": Mode("random:uniform"),
}
"""Every gate mode that recipes can name."""
