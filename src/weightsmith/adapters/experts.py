"""Matrices of experts: which become factors, and in which form.

Where a model stores its experts one by one, each matrix is a module like any other. Where it stores them as parameters
[experts, rows, cols], PEFT has factors of the whole parameter, and vLLM of each expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weightsmith.plans import Block
from weightsmith.structure import Structure
from weightsmith.structure.fused import fused_parts
from weightsmith.structure.projections import GATED
from weightsmith.tensors import MAX_STACKED, TensorSpec

Specs = Mapping[str, TensorSpec]

GROUP = "experts"
"""Group of all experts of a model that are modules: they get one rank, as PEFT and vLLM need it."""

_UNMARKED = "llama4"
"""Models whose modules do not say that their experts are transposed: PEFT takes the rows for outputs."""

_ONE = re.compile(r"\.experts\.\d+\.[^.]+\.weight")


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter [experts, rows, cols] of experts with a gated MLP.

    parameter   as PEFT names it: `….mlp.experts.gate_up_proj`
    transposed  rows are inputs, as in Llama 4 and gpt-oss
    swapped     PEFT's factors are those of the transposed matrices
    """

    parameter: str
    transposed: bool
    swapped: bool
    shape: tuple[int, int, int]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Of each expert's matrix."""
        experts, rows, cols = self.shape
        return tuple(Block(e * rows * cols, rows, cols, cols) for e in range(experts))


def group_of(parameter: str) -> str:
    """The group of a parameter of experts: one rank for those of all layers.

    >>> group_of("model.layers.3.mlp.experts.down_proj")
    'model.layers.N.mlp.experts.down_proj'
    """
    return re.sub(r"\.\d+\.", ".N.", parameter)


def is_expert(name: str) -> bool:
    """Whether a tensor is the matrix of one expert.

    >>> is_expert("model.layers.0.mlp.experts.3.up_proj.weight"), is_expert("model.layers.0.mlp.shared_expert.up_proj.weight")
    (True, False)
    """
    return _ONE.search(name) is not None


def find_stacks(specs: Specs, structure: Structure, config: Mapping[str, Any] | None) -> dict[str, Stack]:
    """tensor → its stack, for those whose shapes say which of their dimensions are inputs: gate and up are twice as wide."""
    found: dict[str, Stack] = {}
    marked = not str((config or {}).get("model_type")).startswith(_UNMARKED)
    for spec in specs.values():
        owner, _, leaf = spec.name.removesuffix(".weight").rpartition(".")
        if leaf not in GATED or not 1 < structure.experts(spec) <= MAX_STACKED:
            continue
        after = GATED[leaf][-1]
        following = specs.get(spec.name.replace(leaf, after)) if spec.name.count(leaf) == 1 else None
        if following is None or len(following.shape) != 3:
            continue
        (experts, rows, cols), (others, out, inner) = spec.shape, following.shape
        direct = (rows, cols) == (2 * inner, out)
        if experts != others or not (direct or (rows, cols) == (inner, 2 * out)):
            continue
        module = owner if owner.endswith("experts") else f"{owner}.experts"
        swapped = not direct and marked
        found[spec.name] = Stack(f"{module}.gate_up_proj", not direct, swapped, (experts, rows, cols))
        found[following.name] = Stack(f"{module}.down_proj", not direct, swapped, (others, out, inner))
    return found


def parts_of(
    spec: TensorSpec, specs: Specs, structure: Structure, config: Mapping[str, Any] | None
) -> Iterator[tuple[str, Block, tuple[int, ...]]]:
    """Module, block and shape of each expert's matrices, as a model that does not fuse them has them."""
    for part in fused_parts(spec, specs, structure, config):
        yield part.name.removesuffix(".weight"), part.block, part.shape
