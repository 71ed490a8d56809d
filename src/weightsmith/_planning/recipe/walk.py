"""Reads the mappings of a recipe by the grammar and collects all problems.

A wrong value is reported and left out, and reading continues, so that the planner can add its own findings. There is no recipe
if its skeleton (method, models, layers) is broken, because the planner would report misspelled keys as missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from weightsmith._base.errors import ParameterError
from weightsmith._planning.recipe.kinds import Level, Walk
from weightsmith._planning.recipe.misuse import HARMLESS, RETIRED, Misuse, elsewhere, explain
from weightsmith._planning.recipe.nodes import Document, Node, Pair, describe, short
from weightsmith._planning.recipe.records import ModelRef, Recipe, Section
from weightsmith._planning.recipe.values import Setting

# If one of these keys is misspelled or wrong, the planner must not mistake the gap for the user's intention.
_SKELETON = {"merge_method", "base_model", "models", "slices", "modules", "sources", "model", "layer_range", "path"}
_SKELETON |= {"experts", "source_model", "copies", "lora"}
_SKELETON |= {"prune_experts", "merge_experts", "keep", "keep_by_layer", "saliency", "groups", "groups_by_layer"}


class Walker(Walk):
    """One reading of a document.

    parameter_names  of all methods: to recognise a parameter outside `parameters:`
    models           every reference that was read
    methods          every merge method that was read, and its position
    """

    def __init__(
        self,
        document: Document,
        filename: str,
        *,
        lenient: bool,
        parameter_names: Collection[str],
        stages: dict[str, Recipe | None] | None = None,
    ) -> None:
        """stages: of the file, to be filled; all its documents share it."""
        super().__init__(filename, document.findings, stages, lenient=lenient)
        self.aliased = document.aliased
        self.parameter_names = parameter_names
        self.models: list[ModelRef] = []
        self.methods: list[tuple[str, str]] = []

    def _misuse(self, misuse: Misuse, where: str) -> bool:
        return self.misused(misuse.what, where, misuse.fix, misuse.error, harmless=misuse.harmless)

    # ---- mappings

    def mapping(self, node: Node, level: Level) -> Any:
        if not isinstance(node.value, dict):
            self.whole = False
            keys = ", ".join(key.name for key in level.keys if key.required) or " or ".join(level.one_of)
            is_model = isinstance(node.value, str) and keys == "model"
            fix = f"Write model: {short(str(node.value))}." if is_model else f"Write a mapping with {keys}."
            self.problem(f"expected a mapping {level.place}, not {describe(node)}", node.where, fix)
            return None
        where = node.where or self.filename  # a Python mapping itself has no key path
        values: dict[str, Any] = {}
        reported: dict[str, Setting] = {}
        meant: set[str] = set()
        for name, pair in node.value.items():
            key = level.key(name)
            if key is None:
                meant.add(self._unknown(name, pair, level, node.value, reported))
            elif pair.value.value is None:
                if key.required:
                    self._broken(name)
                    self.problem(f"the key {name!r} {level.place} has no value", pair.where, f"Write a value after '{name}:'.")
            else:
                value = key.kind.read(pair, key, self)
                if value is None:
                    self._broken(name)
                else:
                    values[name] = value
                    if isinstance(value, ModelRef):
                        self.models.append(value)
                    if name == "merge_method":
                        self.methods.append((value, pair.where))
        required = [key for key in level.keys if key.required]
        for key in required:
            if key.name not in node.value:
                self._broken(key.name)
                if key.name not in meant:  # else its misspelling is reported
                    self.problem(f"the key {key.name!r} is missing {level.place}", where, f"Add {key.name}. {key.doc}")
        self._one_of(level, node.value, where, meant)
        if reported and level.key("parameters"):
            values["parameters"] = {**reported, **values.get("parameters", {})}
        if any(key.name not in values for key in required):
            return None
        return level.make(Section(values, where, {name: pair.value.where for name, pair in node.value.items()}))

    def _broken(self, name: str) -> None:
        if name in _SKELETON:
            self.whole = False

    def _one_of(self, level: Level, pairs: Mapping[str, Pair], where: str, meant: set[str]) -> None:
        written = [name for name in level.one_of if name in pairs and pairs[name].value.value is not None]
        if not level.one_of or len(written) == 1 or (not written and meant & set(level.one_of)):
            return
        self.whole = False
        choice = " or ".join([", ".join(level.one_of[:-1]), level.one_of[-1]])
        if written:
            details = tuple(f"{name} at {pairs[name].where}" for name in written)
            what = f"exactly one of {choice} is allowed {level.place}, not {len(written)}"
            self.problem(what, pairs[written[1]].where, "Keep one of them.", details=details)
        else:
            self.problem(f"one of {choice} is needed {level.place}", where, f"Add {level.one_of[0]}: and a list below it.")

    # ---- keys that the level does not have

    def _unknown(self, name: str, pair: Pair, level: Level, siblings: Mapping[str, Pair], reported: dict[str, Setting]) -> str:
        """Report such a key; the key that was meant, if that is clear. Parameters reported here are added to `reported`."""
        if name.startswith(("x-", "_")):
            return ""
        used = any(anchor in self.aliased for anchor in pair.value.anchors)
        if used and name not in self.parameter_names and not elsewhere(name, level):
            return ""  # a key of the user's own, for values that are used elsewhere by alias
        misuse = explain(name, pair, level, siblings, self.parameter_names)
        if not self._misuse(misuse, pair.where):
            return ""
        if name in self.parameter_names or misuse.meant in self.parameter_names:
            reported[misuse.meant or name] = Setting((), pair.where)
        if misuse.meant == "parameters" and isinstance(pair.value.value, dict):
            reported.update({inner: Setting((), p.where) for inner, p in pair.value.value.items()})
        self._broken(misuse.meant)
        return misuse.meant

    def is_parameter(self, name: str, where: str) -> bool:
        misuse = elsewhere(name, None)
        if (name not in RETIRED and name not in HARMLESS and not misuse) or name in self.parameter_names:
            return True
        if name in RETIRED:
            what, fix = RETIRED[name]
            self.misused(what, where, fix, ParameterError)
        elif name in HARMLESS:
            self.warn(HARMLESS[name], where, "Remove it.")
        elif misuse:
            self._misuse(misuse, where)
        return False
