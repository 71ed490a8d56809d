"""The account of tensors: every tensor of every input is used, or left out for a stated reason, or the plan is refused."""

from __future__ import annotations

from collections.abc import Sequence

from weightsmith._base.errors import Finding, TensorLost, WeightsmithError
from weightsmith._models.structure import Structure
from weightsmith._models.structure.vocabulary import comes_first
from weightsmith._planning.planner.match import ModelNames, home_module
from weightsmith._planning.planner.placement import Placement
from weightsmith._plans import Dropped, Read


class Account:
    """What became of each input tensor.

    copied  for each model, output tensors that are its own alone
    """

    def __init__(self, labels: Sequence[str], names: Sequence[ModelNames]) -> None:
        self.labels = labels
        self.names = names
        self.used: list[set[str]] = [set() for _ in labels]
        self.reasons: list[dict[str, str]] = [{} for _ in labels]
        self.copied: list[list[str]] = [[] for _ in labels]

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
        judge = _Judge(self.labels, self.names, structure, donor, placements)
        dropped: list[Dropped] = []
        problems: list[WeightsmithError] = []
        for model, names in enumerate(self.names):
            used, reasons, lost = self.used[model], self.reasons[model], []
            for tensor in names.specs if len(used) < len(names.specs) else ():
                if tensor in used:
                    continue
                reason = reasons.get(tensor) or judge.reason(model, tensor)
                if reason:
                    dropped.append(Dropped(model, tensor, reason))
                else:
                    lost.append(tensor)
            if lost:
                problems.append(_lost(self.labels[model], lost))
        return tuple(dropped), problems

    def findings(self) -> list[Finding]:
        """One warning for each model that alone gave tensors."""
        return [
            Finding(
                f"{_count(names)} that only {self.labels[model]} has {'is' if len(names) == 1 else 'are'} copied from it",
                names[0],
            )
            for model, names in enumerate(self.copied)
            if names
        ]


def _count(names: Sequence[str]) -> str:
    return f"{len(names):,} tensor{'' if len(names) == 1 else 's'}"


def _lost(label: str, lost: Sequence[str]) -> TensorLost:
    return TensorLost(
        f"{_count(lost)} of {label} would not be in the output",
        where=lost[0],
        fix="report this recipe: every tensor must be used, or be left out for a stated reason",
    )


class _Judge:
    """Why the recipe itself leaves a tensor out: its layer is in no slice, its module is taken from other models."""

    def __init__(
        self,
        labels: Sequence[str],
        names: Sequence[ModelNames],
        structure: Structure,
        donor: int,
        placements: Sequence[Placement],
    ) -> None:
        self.labels = labels
        self.names = names
        self.structure = structure
        self.donor = donor
        self.placements = {p.module: p for p in placements}
        self.home = home_module(structure)
        self.feeding = {f.model for p in placements for s in p.segments for f in s.feeds}

    def reason(self, model: int, tensor: str) -> str:
        """The reason, or "" when there is none."""
        if model not in self.feeding and model != self.donor:
            return "the recipe takes no tensor of this model"
        names, outer = self.names[model], self.names[model].outer.get(tensor, "")
        place = names.place(tensor)
        module = self.structure.module_of(f"{place[0]}0.x" if place is not None else outer)
        if outer and outer not in self.names[self.donor].rest and not self.structure.extra(outer):
            module = self.home
        placement = self.placements[module]
        if not placement.segments:
            return "" if model == self.donor else f"module {module} is copied from {self.labels[self.donor]}"
        feeding = list(dict.fromkeys(f.model for s in placement.segments for f in s.feeds))
        sources = " and ".join(self.labels[m] for m in feeding)
        if model not in feeding:
            return f"module {module} is taken from {sources}"
        if not placement.sliced:
            return ""
        if place is not None and place[0] in placement.sliced:
            ranges = [(f.first, f.end or 0) for s in placement.segments for f in s.feeds if f.model == model]
            return "" if any(a <= place[1] < b for a, b in ranges) else "its layer is in no slice"
        first = bool(outer) and comes_first(outer)
        segment = placement.segments[0 if first else -1]
        which = "first" if first else "last"
        return (
            "" if model in (f.model for f in segment.feeds) else f"it is taken from the {which} slice, which has another model"
        )
