"""A decoder's forward pass on transformers' modules, with one layer's weights in memory at a time.

`forward.py` has the pass; `unfused.py` gives modules one matrix for each matrix of the checkpoint. Both import torch. Weights
come from a `WeightSource`: the context of a product, which merges and decodes them, or a merge that is held in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from weightsmith._base.tensors import TensorSpec
from weightsmith.abc.product import Floats

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


class WeightSource(Protocol):
    """What a decoder reads its weights from, as float32 numbers. A `ProductContext` is one."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors that it has, by name."""

    def fill(self, arrays: Mapping[str, Floats]) -> None:
        """Fill C-contiguous arrays with whole tensors, by name: the decoder uses the memory of one layer for the next."""

    def rows(self, name: str, numbers: Sequence[int]) -> Floats:
        """Some rows of a matrix, float32 [len(numbers), C]: a text needs few rows of an embedding. numbers: ascending."""
