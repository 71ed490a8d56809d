"""A decoder's forward pass on transformers' modules, with one layer's weights in memory at a time.

`forward.py` has the pass; `unfused.py` gives modules one matrix for each matrix of the checkpoint. Both import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Arithmetic = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Base:
    """The model that runs.

    label   as the user named it
    model   its index in the plan; its tokenizer is used
    config  its config.json
    prefix  before the layer number: `model.layers.`
    layers  number of layers
    hidden  size of a hidden state
    instead what else the user may do, for errors: `; or use …`
    arithmetic  dtype in which the linear layers of a layer multiply: `float32` or `bfloat16`
    """

    label: str
    model: int
    config: Mapping[str, Any]
    prefix: str
    layers: int
    hidden: int
    instead: str = ""
    arithmetic: Arithmetic = "float32"
