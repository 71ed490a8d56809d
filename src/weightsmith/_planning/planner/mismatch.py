"""Tensors that do not go together, or do not fit config.json.

Alike ones (the same tensor of every layer, of every expert) are reported once, counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from weightsmith._base.errors import MismatchError, ShapeError, WeightsmithError
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.structure.vocabulary import is_vocabulary
from weightsmith._planning.planner.segments import Segment

OTHER_VOCABULARY = (
    "The vocabularies differ: write tokenizer_source: base (the base's tokenizer), union (with the added tokens of all) "
    "or the model whose tokenizer you want, and rows are matched by token."
)


def of_vocabularies(problem: WeightsmithError) -> bool:
    """True for tensors whose only difference is the number of tokens."""
    return isinstance(problem, ShapeError) and problem.finding.fix == OTHER_VOCABULARY


class Mismatches:
    """Collects missing tensors and unequal shapes."""

    def __init__(self, labels: Sequence[str], specs: Sequence[Mapping[str, TensorSpec]], method: str) -> None:
        self.labels = labels
        self.specs = specs
        self.method = method
        self._found: dict[object, tuple[MismatchError, int]] = {}

    def missing(self, name: str, segment: Segment, sources: Sequence[str | None]) -> None:
        """Some inputs of the segment have no tensor `name`."""
        found = [None if s is None else self.specs[f.model][s] for f, s in zip(segment.feeds, sources, strict=True)]
        self._add(
            ("missing", id(segment), _pattern(name), tuple(s is None for s in sources)),
            MismatchError(
                "not all the models have this tensor",
                where=name,
                details=[
                    f"{self.labels[f.model]}: {'missing' if s is None else _shown(s)}"
                    for f, s in zip(segment.feeds, found, strict=True)
                ],
                fix="merge models that have the same tensors; only a whole module that one model has is copied from it",
            ),
        )

    def unequal(self, name: str, segment: Segment, specs: Sequence[TensorSpec]) -> None:
        """The inputs of a tensor differ in shape."""
        fix = ""
        vocabulary = any(map(is_vocabulary, specs))
        if vocabulary and len({s.shape[1:] for s in specs}) == 1:
            fix = OTHER_VOCABULARY
        self._add(
            ("unequal", id(segment), _pattern(name), tuple(s.shape for s in specs)),
            ShapeError(
                f"'{self.method}' needs equal shapes",
                where=name,
                details=[f"{self.labels[f.model]}: {_shown(s)}" for f, s in zip(segment.feeds, specs, strict=True)],
                fix=fix or "merge models of one size; 'passthrough' takes tensors of one model each",
            ),
        )

    def unlike_donor(self, name: str, segment: Segment, spec: TensorSpec, model: int, own: TensorSpec, donor: int) -> None:
        """A tensor outside the layers has another shape than in the donor, whose config.json the output takes.

        spec, model  the tensor and the model that it comes from
        own, donor   the donor's
        """
        self._add(
            ("unlike", id(segment), _pattern(name), spec.shape, own.shape),
            ShapeError(
                f"the config.json of {self.labels[donor]} builds this tensor with another shape",
                where=name,
                details=[f"{self.labels[model]}: {_shown(spec)}", f"{self.labels[donor]}: {_shown(own)}"],
                fix=f"choose models of one size, or take what surrounds the layers from {self.labels[donor]}: embeddings and "
                "positions come from the first slice, norms and heads from the last",
            ),
        )

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

    def _add(self, key: object, error: MismatchError) -> None:
        first, n = self._found.get(key, (error, 0))
        self._found[key] = first, n + 1


def _shown(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {spec.dtype}"


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", name)
