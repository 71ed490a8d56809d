"""Which layer of the donor describes each output layer in config.json.

`structure.resize_config` makes the new config from the donor's own layers. A layer that comes from another model must
have a counterpart among them: a layer of the donor with the same tensors and shapes, and of the same kind (attention
type, dense or sparse) as far as the two configs tell kinds apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from weightsmith._base.errors import LayerError
from weightsmith._models.structure import Stack
from weightsmith._models.structure.perlayer import Remap, is_per_layer
from weightsmith._models.structure.rules import rules_for
from weightsmith._planning.planner.match import ModelNames, is_buffer

Shapes = Mapping[str, tuple[int, ...]]


class Counterparts:
    """Finds the donor's layer for a layer of another model."""

    def __init__(
        self,
        names: Sequence[ModelNames],
        configs: Sequence[Mapping[str, Any] | None],
        donor: int,
        labels: Sequence[str],
    ) -> None:
        self.names = names
        self.configs = configs
        self.donor = donor
        self.labels = labels
        self._shapes: dict[tuple[int, str], list[Shapes]] = {}
        self._kinds: dict[tuple[int, str], list[Hashable]] = {}
        self._found: dict[tuple[int, str, int], int] = {}

    def find(self, prefix: str, model: int, layer: int) -> int:
        """The donor's layer that is like `layer` of `model` under the donor's stack `prefix`; the nearest by number.

        Raises LayerError when there is none.
        """
        if model == self.donor:
            return layer
        key = (model, prefix, layer)
        if key not in self._found:
            self._found[key] = self._find(prefix, model, layer)
        return self._found[key]

    def _find(self, prefix: str, model: int, layer: int) -> int:
        theirs, mine = self._shapes_of(self.donor, prefix), self._shapes_of(model, prefix)[layer]
        alike = [i for i, shapes in enumerate(theirs) if shapes == mine]
        if not alike:
            raise self._unlike(prefix, model, layer, theirs[min(layer, len(theirs) - 1)], mine)
        kind, kinds = self._kinds_of(model, prefix)[layer], self._kinds_of(self.donor, prefix)
        same = [i for i in alike if kinds[i] == kind]
        if not same:
            raise LayerError(
                f"layer {layer} of {self.labels[model]} is of a kind that no layer of {self.labels[self.donor]} has, whose "
                "config.json the output takes",
                details=[f"{self.labels[model]}: {kind}", f"{self.labels[self.donor]}: {kinds[alike[0]]}"],
                fix="take layers that both models have, or name the other model as base_model",
            )
        return min(same, key=lambda i: (abs(i - layer), i))

    def _unlike(self, prefix: str, model: int, layer: int, theirs: Shapes, mine: Shapes) -> LayerError:
        differing = next(n for n in dict.fromkeys([*theirs, *mine]) if theirs.get(n) != mine.get(n))
        here, there = (list(s[differing]) if differing in s else "missing" for s in (mine, theirs))
        return LayerError(
            f"the config.json of {self.labels[self.donor]} cannot express layer {layer} of {self.labels[model]}: none of its "
            "own layers has these tensors and shapes",
            where=f"{prefix}{layer}.{differing}",
            details=[f"{self.labels[model]}: {here}", f"{self.labels[self.donor]}: {there}"],
            fix="take layers of models of one architecture and size",
        )

    def _shapes_of(self, model: int, prefix: str) -> list[Shapes]:
        key = (model, prefix)
        if key not in self._shapes:
            names = self.names[model]
            layers = names.layers.get(prefix, {})
            self._shapes[key] = [
                {suffix: names.specs[own].shape for suffix, own in layers.get(i, {}).items() if not is_buffer(names.specs[own])}
                for i in range(names.depth.get(prefix, 0))
            ]
        return self._shapes[key]

    def _kinds_of(self, model: int, prefix: str) -> list[Hashable]:
        """What a model's config says of each of its layers, in the terms that the donor's config has too."""
        key = (model, prefix)
        if key not in self._kinds:
            n = self.names[model].depth.get(prefix, 0)
            mine, theirs = self._home(model, prefix), self._home(self.donor, prefix)
            n_donor = self.names[self.donor].depth.get(prefix, 0)
            said: list[tuple[Hashable, ...]] = []
            for name, value in theirs.items():
                if _per_layer(name, value, n_donor) and _per_layer(name, mine.get(name), n):
                    said.append(tuple(f"{name} = {v!r}" for v in mine[name][:n]))
            if not said:  # model code reads the list, if there is one; numbers next to it may be stale
                said = [tuple(rule.kinds(mine, n)) for rule in rules_for(theirs) if rule.applies(mine)]
            self._kinds[key] = list(zip(*said, strict=True)) if said else [()] * n
        return self._kinds[key]

    def _home(self, model: int, prefix: str) -> Mapping[str, Any]:
        """The part of a model's config that describes a stack."""
        names, config = self.names[model], self.configs[model] or {}
        stack: Stack | None = next((s for s in names.structure.stacks if names.paired[s.prefix] == prefix), None)
        return stack.section(config) if stack is not None else config


def _per_layer(name: str, value: Any, n_layers: int) -> bool:
    return isinstance(value, list | str) and is_per_layer(name, value, Remap(tuple(range(n_layers)), n_layers))
