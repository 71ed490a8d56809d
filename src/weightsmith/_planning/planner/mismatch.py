"""Tensors that do not go together, or do not fit config.json.

Alike ones (the same tensor of every layer, of every expert) are reported once, counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from weightsmith._base.errors import MismatchError, ShapeError, WeightsmithError
from weightsmith._base.tensors import TensorSpec
from weightsmith._models.structure.vocabulary import may_have_tokens
from weightsmith._planning.planner.inputs import changed
from weightsmith._planning.planner.match import Models
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

    def __init__(self, models: Models, method: str) -> None:
        self.labels, self.specs, self.method = models.labels, models.specs, method
        self._found: dict[object, tuple[MismatchError, int]] = {}

    def missing(self, name: str, segment: Segment, places: Sequence[int], sources: Sequence[str | None]) -> None:
        """Some inputs of the segment have no tensor `name`. places: of those that count for it."""
        pairs = [(segment.feeds[k].model, sources[k]) for k in places]
        found = [(model, None if source is None else self.specs[model][source]) for model, source in pairs]
        details = [f"{self.labels[model]}: {'missing' if s is None else _shown(s)}" for model, s in found]
        fix = "merge models that have the same tensors; only a whole module that one model has is copied from it"
        error = MismatchError("not all the models have this tensor", where=name, details=details, fix=fix)
        self._add(error, segment, tuple(s is None for s in sources))

    def unequal(self, name: str, segment: Segment, inputs: Mapping[int, TensorSpec]) -> None:
        """The inputs of a tensor differ in shape. inputs: by their places in the segment."""
        specs = list(inputs.values())
        fix = "merge models of one size; 'passthrough' takes tensors of one model each"
        if any(map(may_have_tokens, specs)) and len({s.shape[1:] for s in specs}) == 1:
            fix = OTHER_VOCABULARY
        details = [f"{self.labels[segment.feeds[k].model]}: {_shown(spec)}" for k, spec in inputs.items()]
        error = ShapeError(f"'{self.method}' needs equal shapes", where=name, details=details, fix=fix)
        self._add(error, segment, tuple(s.shape for s in specs))

    def unlike_donor(self, name: str, segment: Segment, spec: TensorSpec, model: int, own: TensorSpec, donor: int) -> None:
        """A tensor outside the layers has another shape than in the donor, whose config.json the output takes.

        spec, model  the tensor and the model that it comes from
        own, donor   the donor's
        """
        what = f"the config.json of {self.labels[donor]} builds this tensor with another shape"
        details = [f"{self.labels[model]}: {_shown(spec)}", f"{self.labels[donor]}: {_shown(own)}"]
        fix = f"choose models of one size, or take what surrounds the layers from {self.labels[donor]}: "
        fix += "embeddings and positions come from the first slice, norms and heads from the last"
        self._add(ShapeError(what, where=name, details=details, fix=fix), segment, (spec.shape, own.shape))

    def problems(self) -> list[WeightsmithError]:
        """The problems in the order found."""
        more = {n: f"; so for {n - 1:,} more like it" if n > 1 else "" for _, n in self._found.values()}
        return [changed(error, what=error.finding.what + more[n]) for error, n in self._found.values()]

    def _add(self, error: MismatchError, segment: Segment, differing: tuple[object, ...]) -> None:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "N", error.finding.where)
        key = (error.finding.what, id(segment), pattern, differing)
        first, n = self._found.get(key, (error, 0))
        self._found[key] = first, n + 1


def _shown(spec: TensorSpec) -> str:
    return f"{list(spec.shape)} {spec.dtype}"
