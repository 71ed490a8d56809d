"""The account of tensors: every tensor of every input is used, or left out for a stated reason, or the plan is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsmith._base.errors import Finding, TensorLost, WeightsmithError
from weightsmith._base.text import count
from weightsmith._models.structure import Structure
from weightsmith._models.structure.vocabulary import comes_first
from weightsmith._planning.planner.match import ModelNames, home_module
from weightsmith._planning.planner.segments import Placement
from weightsmith._plans import Dropped, Read

UNREAD = "its weight is 0"
"""Why a tensor of a model that counts for nothing is left out."""


class Account:
    """What became of each input tensor.

    copied  for each model, output tensors that are its own alone
    unread  models that count for nothing in some segment: their weight is 0
    """

    def __init__(self, labels: Sequence[str], names: Sequence[ModelNames]) -> None:
        self.labels = labels
        self.names = names
        self.used: list[set[str]] = [set() for _ in labels]
        self.reasons: list[dict[str, str]] = [{} for _ in labels]
        self.copied: list[list[str]] = [[] for _ in labels]
        self.unread: set[int] = set()

    def use(self, source: Read) -> None:
        """A tensor feeds the output."""
        self.used[source.model].add(source.tensor)

    def drop(self, model: int, tensor: str, reason: str) -> None:
        """A tensor is left out; should something else use it, that counts."""
        self.reasons[model].setdefault(tensor, reason)

    def drop_everywhere(self, name: str, reason: str) -> None:
        """The same for all models that store the tensor, which is outside the layers; `name` is the donor's."""
        for model, names in enumerate(self.names):
            if name in names.rest:
                self.drop(model, names.rest[name], reason)

    def settle(
        self, structure: Structure, donor: int, placements: Sequence[Placement]
    ) -> tuple[tuple[Dropped, ...], list[WeightsmithError]]:
        """What is left out and why, in model order; one TensorLost for each model with tensors that have no reason.

        structure  the donor's
        """
        placed = {p.module: p for p in placements}
        feeding = {donor, *(f.model for p in placements for s in p.segments for f in s.feeds)}
        dropped: list[Dropped] = []
        problems: list[WeightsmithError] = []
        for model, names in enumerate(self.names):
            used, reasons, lost = self.used[model], self.reasons[model], []
            for tensor in names.specs if len(used) < len(names.specs) else ():
                if tensor in used:
                    continue
                reason = reasons.get(tensor, "")
                if not reason and model not in feeding:
                    reason = "the recipe takes no tensor of this model"
                reason = reason or self._reason(model, tensor, structure, donor, placed)
                if reason := reason or (UNREAD if model in self.unread else ""):
                    dropped.append(Dropped(model, tensor, reason))
                else:
                    lost.append(tensor)
            if lost:
                what = f"{count(len(lost), 'tensor')} of {self.labels[model]} would not be in the output"
                fix = "report this recipe: every tensor must be used, or be left out for a stated reason"
                problems.append(TensorLost(what, where=lost[0], fix=fix))
        return tuple(dropped), problems

    def _reason(self, model: int, tensor: str, structure: Structure, donor: int, placed: Mapping[str, Placement]) -> str:
        """Why the recipe itself leaves a tensor out: its layer is in no slice, its module is taken from other models; or ""."""
        names, outer = self.names[model], self.names[model].outer.get(tensor, "")
        place = names.place(tensor)
        module = structure.module_of(f"{place[0]}0.x" if place is not None else outer)
        if outer and outer not in self.names[donor].rest and not structure.extra(outer):
            module = home_module(structure)
        placement = placed[module]
        if not placement.segments:
            return "" if model == donor else f"module {module} is copied from {self.labels[donor]}"
        feeding = list(dict.fromkeys(f.model for s in placement.segments for f in s.feeds))
        if model not in feeding:
            return f"module {module} is taken from {' and '.join(self.labels[m] for m in feeding)}"
        if not placement.sliced:
            return ""
        if place is not None and place[0] in placement.sliced:
            ranges = [(f.first, f.end or 0) for s in placement.segments for f in s.feeds if f.model == model]
            return "" if any(a <= place[1] < b for a, b in ranges) else "its layer is in no slice"
        first = bool(outer) and comes_first(outer)
        if any(f.model == model for f in placement.segments[0 if first else -1].feeds):
            return ""
        return f"it is taken from the {'first' if first else 'last'} slice, which has another model"

    def findings(self) -> list[Finding]:
        """One warning for each model that alone gave tensors."""
        findings = []
        for label, names in zip(self.labels, self.copied, strict=True):
            if names:
                are = "is" if len(names) == 1 else "are"
                findings.append(Finding(f"{count(len(names), 'tensor')} that only {label} has {are} copied from it", names[0]))
        return findings
