"""Tensors that do not go together. Alike ones (the same tensor of every layer, of every expert) are told once, counted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from weightsmith.errors import MismatchError, ShapeError, WeightsmithError
from weightsmith.formats.safetensors import StoredTensor
from weightsmith.planner.blocks import Block
from weightsmith.planner.vocabulary import is_embedding, is_head
from weightsmith.tensors import TensorSpec


class Mismatches:
    """Collects missing tensors and unequal shapes."""

    def __init__(self, labels: Sequence[str], tensors: Sequence[Mapping[str, StoredTensor]], method: str) -> None:
        self.labels = labels
        self.tensors = tensors
        self.method = method
        self._found: dict[object, tuple[MismatchError, int]] = {}
        self._blocks: set[int] = set()

    def missing(self, name: str, block: Block, sources: Sequence[str | None]) -> None:
        """Some inputs of the block have no tensor `name`."""
        found = [None if s is None else self.tensors[f.model][s] for f, s in zip(block.feeds, sources, strict=True)]
        self._add(
            ("missing", id(block), _pattern(name), tuple(s is None for s in sources)),
            block,
            MismatchError(
                "not all the models have this tensor",
                where=name,
                details=[
                    f"{self.labels[f.model]}: {'missing' if s is None else _shown(s)}"
                    for f, s in zip(block.feeds, found, strict=True)
                ],
                fix="merge models that have the same tensors; only a whole module that one model has is copied from it",
            ),
        )

    def unequal(self, name: str, block: Block, specs: Sequence[TensorSpec]) -> None:
        """The inputs of a tensor differ in shape."""
        fix = ""
        vocabulary = any(is_embedding(s) or is_head(s) for s in specs)
        if vocabulary and len({s.shape[1:] for s in specs}) == 1:
            fix = "the vocabularies differ in size: give all models the same tokenizer and number of rows first"
        self._add(
            ("unequal", id(block), _pattern(name), tuple(s.shape for s in specs)),
            block,
            ShapeError(
                f"'{self.method}' needs equal shapes",
                where=name,
                details=[
                    f"{self.labels[f.model]}: {_shown(self.tensors[f.model][s.name])}"
                    for f, s in zip(block.feeds, specs, strict=True)
                ],
                fix=fix or "merge models of one size; 'passthrough' takes tensors of one model each",
            ),
        )

    def concerns(self, block: Block) -> bool:
        """True when a problem of this block was found."""
        return id(block) in self._blocks

    def problems(self) -> list[WeightsmithError]:
        """The problems in the order found."""
        return [
            type(e)(
                e.finding.what + (f"; so for {n - 1:,} more like it" if n > 1 else ""),
                where=e.finding.where,
                details=e.finding.details,
                fix=e.finding.fix,
            )
            for e, n in self._found.values()
        ]

    def _add(self, key: object, block: Block, error: MismatchError) -> None:
        self._blocks.add(id(block))
        first, n = self._found.get(key, (error, 0))
        self._found[key] = first, n + 1


def _shown(tensor: StoredTensor) -> str:
    return f"{list(tensor.spec.shape)} {tensor.spec.dtype} in {tensor.file.name}"


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", name)
