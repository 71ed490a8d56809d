"""A decoder's forward pass on transformers' modules, with one layer's weights in memory at a time.

`forward.py` has the pass; `unfused.py` gives modules one matrix for each matrix of the checkpoint; `channels.py` finds the
features that can be scaled. All three import torch. Weights come from a `WeightSource`: the context of a product, which merges
and decodes them, or a merge that is held in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

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


Maker = Literal["norm", "offset norm", "linear"]
"""A norm multiplies by its weight; one with an offset by 1 + its weight; of a linear layer, rows are features."""


@dataclass(frozen=True, slots=True)
class Features:
    """Features that can be scaled.

    maker    what makes them
    weight   its stored name
    bias     the stored name of its bias; "" for none
    readers  stored names of the weights of linear layers that read them, and nothing else does
    heads    (count, width): of the inputs of the readers, each run of `width` features comes from one head, and `count` runs
             after each other from the same one. (1, 1): they are read in the order in which they are made
    """

    maker: Maker
    weight: str
    bias: str
    readers: tuple[str, ...]
    heads: tuple[int, int] = (1, 1)


def spread(values: npt.NDArray[Any], heads: tuple[int, int]) -> npt.NDArray[Any]:
    """Values of features as those of the inputs of their readers.

    heads  as in `Features`

    >>> spread(np.arange(4), (2, 2)).tolist()
    [0, 1, 0, 1, 2, 3, 2, 3]
    """
    count, width = heads
    return values if count == 1 else np.repeat(values.reshape(-1, 1, width), count, 1).reshape(-1)


class WeightSource(Protocol):
    """What a decoder reads its weights from, as float32 numbers. A `ProductContext` is one."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors that it has, by name."""

    def fill(self, arrays: Mapping[str, Floats]) -> None:
        """Fill C-contiguous arrays with whole tensors, by name: the decoder uses the memory of one layer for the next."""

    def rows(self, name: str, numbers: Sequence[int]) -> Floats:
        """Some rows of a matrix, float32 [len(numbers), C]: a text needs few rows of an embedding. numbers: ascending."""
