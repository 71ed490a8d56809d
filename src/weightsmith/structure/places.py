"""Where a tensor is: its layer, and what it is there. For tables and heat maps by layer and part."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weightsmith.structure.model import Structure

OUTSIDE = "outside the layers"

_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is.

    stack   prefix of its stack, `model.layers.`; "" outside the layers
    layer   its number; -1 outside
    part    what it is in its layer, without numbers: `self_attn.q_proj`, `mlp.experts.up_proj`, `self_attn.q_proj.bias`
    """

    stack: str
    layer: int
    part: str

    @property
    def group(self) -> str:
        """Its layer as a name: `model.layers.3`."""
        return f"{self.stack}{self.layer}" if self.stack else OUTSIDE


def place_of(structure: Structure, name: str) -> Place:
    """The place of a tensor.

    >>> from weightsmith.structure import analyse
    >>> from weightsmith.tensors import DTYPES, TensorSpec
    >>> names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in (0, 1) for e in (0, 1)]
    >>> specs = [TensorSpec(name, DTYPES["BF16"], (4, 4)) for name in names]
    >>> place_of(analyse(specs, {"num_hidden_layers": 2}), names[3])
    Place(stack='model.layers.', layer=1, part='mlp.experts.up_proj')
    """
    found = structure.locate(name) or structure.extra(name)
    if found is None:
        return Place("", -1, _NUMBER.sub("", name.removeprefix("model.").removesuffix(".weight")))
    stack, layer = found
    layer += stack.n_layers if structure.locate(name) is None else 0
    suffix = (structure.suffix(name) or "").removesuffix(".weight")
    return Place(stack.prefix, layer, _NUMBER.sub("", f".{suffix}").removeprefix("."))
