"""The tree of a recipe to the Recipe, with every problem found on the way.

A value that is wrong is reported and left out, and the walk goes on. What is left is a Recipe when its skeleton
(method, models, layers) is whole, so that the plan can report its own findings beside these. Otherwise there is none:
the plan would complain of things that are only missing because they were misspelled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import yaml

from weightsmith.errors import ParameterError, Unsupported, WeightsmithError
from weightsmith.recipe.grammar import CONDITION, LEVELS, PATH, RECIPE, REFERENCE, SCHEDULE, Key, Level
from weightsmith.recipe.misuse import HARMLESS, REFUSED, RETIRED, UNUSED, Misuse, elsewhere, explain
from weightsmith.recipe.nested import NESTED, read_flag
from weightsmith.recipe.nodes import Document, Node, Pair, describe, plain, short
from weightsmith.recipe.records import Input, ModelRef, Module, Recipe, Section, Slice
from weightsmith.recipe.references import parse_path, parse_reference
from weightsmith.recipe.report import Report
from weightsmith.recipe.schedules import Rule, Schedule
from weightsmith.recipe.single import (
    read_choice,
    read_count,
    read_decay,
    read_dtype,
    read_layer_range,
    read_number,
    read_share,
    read_text,
    read_texts,
    read_value,
)
from weightsmith.recipe.values import Entry, Setting
from weightsmith.recipe.yaml import read_yaml

# Misspelling one of these, or a fault inside, leaves a hole that the plan must not take for the user's intention.
_SKELETON = {"merge_method", "base_model", "models", "slices", "modules", "sources", "model", "layer_range", "path"}
_SKELETON |= {"experts", "source_model", "copies", "lora"}
_SKELETON |= {"prune_experts", "merge_experts", "keep", "keep_by_layer", "saliency", "groups", "groups_by_layer"}


def parse(
    text: str, filename: str, *, lenient: bool = False, parameter_names: Collection[str] = ()
) -> tuple[Recipe | None, list[WeightsmithError]]:
    """The recipe in a YAML text, and all its problems in the order of the text. Never raises.

    filename         for positions
    lenient          what mergekit ignores without a word becomes a warning, and is ignored
    parameter_names  of all methods: to recognise a parameter that stands outside `parameters:`
    Recipe is None when its skeleton is broken; with no problems it is always there.

    >>> recipe, problems = parse("merge_method: linear\\nmodels: [{modle: a}]\\n", "r.yml")
    >>> print(problems[0])
    r.yml:2:11: unknown key 'modle' in an entry of 'models' (did you mean 'model'?); mergekit ignored it without a word
      -> Write 'model'.
    """
    document = read_yaml(text, filename, lenient=lenient)
    recipe, problems = build(document, text, filename, lenient=lenient, parameter_names=parameter_names)
    return recipe, in_order(problems)


def build(
    document: Document, text: str, filename: str, *, lenient: bool, parameter_names: Collection[str]
) -> tuple[Recipe | None, list[WeightsmithError]]:
    """The recipe in a tree, and all its problems; see `parse`."""
    report = Report(lenient, parameter_names, document.findings)
    recipe = Walk(document, filename, report).recipe(document.root, text) if document.root else None
    return recipe, unique([*document.problems, *report.problems])


def unique(problems: Sequence[WeightsmithError]) -> list[WeightsmithError]:
    """Each problem once: an aliased value is walked at each of its uses."""
    seen: dict[tuple[type, str], WeightsmithError] = {}
    for problem in problems:
        seen.setdefault((type(problem), str(problem)), problem)
    return list(seen.values())


def in_order(problems: Sequence[WeightsmithError]) -> list[WeightsmithError]:
    """The problems of a text in its order: those of the text itself were found in a pass of their own."""
    return sorted(problems, key=_position)


def _position(problem: WeightsmithError) -> tuple[int, int]:
    _, line, column = problem.finding.where.rsplit(":", 2)
    return int(line), int(column)


class Walk:
    """Reads the levels of a grammar from a document, and writes every problem into its report."""

    def __init__(self, document: Document, filename: str, report: Report) -> None:
        self.filename = filename
        self.aliased = document.aliased
        self.report = report
        self.by_kind: dict[str, Callable[[Pair, Key], Any]] = {
            "text": partial(read_text, report=report),
            "dtype": partial(read_dtype, report=report),
            "model": self.model,
            "path": self.path,
            "layer_range": partial(read_layer_range, report=report),
            "parameters": self.parameters,
            "value": self.value,
            "share": partial(read_share, report=report),
            "count": partial(read_count, report=report),
            "decay": partial(read_decay, report=report),
            "choice": partial(read_choice, report=report),
            "texts": partial(read_texts, report=report),
            "number": partial(read_number, report=report),
            "source": self.source,
            "flag": partial(read_flag, report=report),
            "section": self.inner,
            "list": self.listed,
            "named": self.named,
            "refused": self.refused,
            "unused": self.unused,
            **{kind: partial(reader, report=report) for kind, reader in NESTED.items()},
        }

    # --- mappings ----------------------------------------------------------------------------------------------------

    def recipe(self, root: Node, text: str) -> Recipe | None:
        if root.value is None:
            self.report.problem("the recipe is empty", root.where, "It needs merge_method and models, slices or modules.")
            return None
        found = self.level(root, RECIPE)
        if found is None or not self.report.whole or "merge_method" not in found:
            return None
        assert isinstance(root.value, dict)
        return Recipe(
            merge_method=found["merge_method"],
            base_model=found.get("base_model"),
            models=found.get("models", ()),
            slices=found.get("slices", ()),
            modules=found.get("modules", ()),
            parameters=found.get("parameters", {}),
            dtype=found.get("dtype"),
            out_dtype=found.get("out_dtype"),
            name=found.get("name", ""),
            text=text,
            filename=self.filename,
            findings=tuple(self.report.findings),
            positions={name: pair.where for name, pair in root.value.items()},
        )

    def level(self, node: Node, level: Level) -> dict[str, Any] | None:
        """The values of one mapping, by key; None when it is no mapping."""
        if not isinstance(node.value, dict):
            self.report.whole = False
            keys = ", ".join(key.name for key in level.keys if key.required) or " or ".join(level.one_of)
            is_model = isinstance(node.value, str) and keys == "model"
            fix = f"Write model: {short(str(node.value))}." if is_model else f"Write a mapping with {keys}."
            self.report.problem(f"expected a mapping {level.place}, not {describe(node)}", node.where, fix)
            return None
        found: dict[str, Any] = {}
        reported: dict[str, Setting] = {}
        meant: set[str] = set()
        for name, pair in node.value.items():
            key = level.key(name)
            if key is None:
                meant.add(self.unknown(name, pair, level, node.value, reported))
            elif pair.value.value is None:
                if key.required:
                    self.broken(key)
                    self.report.problem(f"the key {name!r} {level.place} has no value", pair.where)
            else:
                value = self.by_kind[key.kind](pair, key)
                if value is None:
                    self.broken(key)
                else:
                    found[name] = value
        for key in level.keys:
            if key.required and key.name not in node.value:
                self.broken(key)
                if key.name not in meant:  # else its misspelling is reported
                    fix = f"Add {key.name}. {key.doc}"
                    self.report.problem(f"the key {key.name!r} is missing {level.place}", self.start(node), fix)
        self.one_of(level, node, meant)
        if reported:
            found["parameters"] = {**reported, **found.get("parameters", {})}
        return found

    def start(self, node: Node) -> str:
        return node.where or self.filename  # a Python mapping itself has no key path

    def broken(self, key: Key) -> None:
        if key.name in _SKELETON:
            self.report.whole = False

    def one_of(self, level: Level, node: Node, meant: set[str]) -> None:
        assert isinstance(node.value, dict)
        given = [name for name in level.one_of if name in node.value and node.value[name].value.value is not None]
        if not level.one_of or len(given) == 1 or (not given and meant & set(level.one_of)):
            return
        self.report.whole = False
        choice = " or ".join([", ".join(level.one_of[:-1]), level.one_of[-1]])
        if given:
            details = tuple(f"{name} at {node.value[name].where}" for name in given)
            what = f"exactly one of {choice} is allowed {level.place}, not {len(given)}"
            self.report.problem(what, node.value[given[1]].where, "Keep one of them.", details=details)
        else:
            self.report.problem(f"one of {choice} is needed {level.place}", self.start(node))

    def unknown(self, name: str, pair: Pair, level: Level, siblings: Mapping[str, Pair], reported: dict[str, Setting]) -> str:
        """Report a key the level does not have; the key that was meant, if that is clear."""
        if name.startswith(("x-", "_")):
            return ""
        used = any(anchor in self.aliased for anchor in pair.value.anchors)
        if used and name not in self.report.parameter_names and not elsewhere(name, level):
            return ""  # a place of the user's own for values that are used elsewhere by alias
        misuse = explain(name, pair, level, siblings, self.report.parameter_names)
        if self.report.misused(misuse, pair.where):
            if name in self.report.parameter_names or misuse.meant in self.report.parameter_names:
                reported[misuse.meant or name] = Setting((), pair.where)
            if misuse.meant == "parameters" and isinstance(pair.value.value, dict):
                reported.update({inner: Setting((), p.where) for inner, p in pair.value.value.items()})
            if misuse.meant in _SKELETON:
                self.report.whole = False
            return misuse.meant
        return ""

    # --- lists and named mappings ------------------------------------------------------------------------------------

    def listed(self, pair: Pair, key: Key) -> tuple[Any, ...] | None:
        assert key.of is not None
        if not isinstance(pair.value.value, tuple):
            fix = f"Write each entry after a dash: - {key.of.names[0]}: ..."
            self.report.problem(f"{key.name!r} takes a list, not {describe(pair.value)}", pair.value.where, fix)
            return None
        if not pair.value.value:
            self.report.problem(f"{key.name!r} is empty", pair.value.where)
            return None
        return tuple(e for node in pair.value.value if (e := self.entry(node, key.of)) is not None)

    def section(self, node: Node, level: Level) -> Section | None:
        """A mapping of a level without a record of its own; None when it is no mapping, or lacks what it needs."""
        found = self.level(node, level)
        if found is None or any(key.required and key.name not in found for key in level.keys):
            return None
        assert isinstance(node.value, dict)
        return Section(found, self.start(node), {name: pair.value.where for name, pair in node.value.items()})

    def inner(self, pair: Pair, key: Key) -> Section | None:
        """The value of a `section` key."""
        assert key.of is not None
        return self.section(pair.value, key.of)

    def entry(self, node: Node, level: Level) -> Input | Slice | Section | None:
        if level not in LEVELS:
            return self.section(node, level)
        found = self.level(node, level)
        if found is None:
            return None
        if level.name == "slice":
            base = found.get("base_model")
            return Slice(found.get("sources", ()), base, found.get("parameters", {}), node.where)
        if "model" not in found:
            return None
        layers = found.get("layer_range")
        at = node.value["layer_range"].value.where if layers and isinstance(node.value, dict) else ""
        return Input(found["model"], layers, found.get("parameters", {}), node.where, at)

    def named(self, pair: Pair, key: Key) -> tuple[Module, ...] | None:
        assert key.of is not None
        if not isinstance(pair.value.value, dict):
            fix = "Write each module under its name: text_decoder: {models: [...]}."
            self.report.problem(f"{key.name!r} takes a mapping of names, not {describe(pair.value)}", pair.value.where, fix)
            return None
        if not pair.value.value:
            self.report.problem(f"{key.name!r} is empty", pair.value.where)
            return None
        modules = []
        for name, inner in pair.value.value.items():
            found = self.level(inner.value, key.of)
            if found is not None:
                models, slices = found.get("models", ()), found.get("slices", ())
                modules.append(Module(name, models, slices, found.get("parameters", {}), inner.where))
        return tuple(modules)

    # --- single values -----------------------------------------------------------------------------------------------

    def refused(self, pair: Pair, key: Key) -> None:
        what, fix = REFUSED[key.name]
        self.report.problem(what, pair.where, fix, Unsupported)

    def unused(self, pair: Pair, key: Key) -> None:
        self.report.warn(UNUSED[key.name], pair.where, "Remove it.")

    # --- models ------------------------------------------------------------------------------------------------------

    def model(self, pair: Pair, key: Key) -> ModelRef | None:
        value, where = pair.value.value, pair.value.where
        if isinstance(value, str):
            return self.referenced(parse_reference(value, where))
        if isinstance(value, dict):
            found = self.level(pair.value, REFERENCE) or {}
            model, lora = found.get("model"), found.get("lora")
            return model.with_lora(lora) if model is not None and lora is not None else model
        self.not_a_model(pair, key)
        return None

    def source(self, pair: Pair, key: Key) -> ModelRef | Recipe | None:
        """A model, or the recipe of a merge in its place."""
        if isinstance(pair.value.value, dict) and "merge_method" in pair.value.value:
            return self.recipe(pair.value, yaml.safe_dump(plain(pair.value), sort_keys=False, allow_unicode=True))
        return self.model(pair, key)

    def path(self, pair: Pair, key: Key) -> ModelRef | None:
        value, where = pair.value.value, pair.value.where
        if isinstance(value, str):
            return self.referenced(parse_path(value, where))
        if isinstance(value, dict):
            found = self.level(pair.value, PATH)
            if not found or "path" not in found:
                return None
            revision = found.get("revision", "")
            text = f"{found['path']}@{revision}" if revision else found["path"]
            return ModelRef(found["path"], revision, text, where)
        self.not_a_model(pair, key)
        return None

    def not_a_model(self, pair: Pair, key: Key) -> None:
        value = pair.value.value
        fix = "Write path_or_hub_id[@revision]" + ("; put digits in quotes." if isinstance(value, int | float) else ".")
        self.report.problem(f"{key.name!r} takes a model, not {describe(pair.value)}", pair.value.where, fix)

    def referenced(self, outcome: ModelRef | WeightsmithError) -> ModelRef | None:
        if isinstance(outcome, ModelRef):
            return outcome
        self.report.problems.append(outcome)
        return None

    # --- parameters --------------------------------------------------------------------------------------------------

    def parameters(self, pair: Pair, key: Key) -> dict[str, Setting] | None:
        if not isinstance(pair.value.value, dict):
            what = f"'parameters' takes a mapping of names to values, not {describe(pair.value)}"
            self.report.problem(what, pair.value.where, "Write parameters: {weight: 0.5}.")
            self.report.whole = False  # the plan would report each required parameter as missing
            return None
        settings: dict[str, Setting] = {}
        for name, inner in pair.value.value.items():
            misuse = None if name in self.report.parameter_names else self.not_a_parameter(name)
            if misuse:
                self.report.misused(misuse, inner.where)
            else:
                settings[name] = Setting(self.entries(name, inner), inner.where)
        return settings

    def not_a_parameter(self, name: str) -> Misuse | None:
        """Names that are known to be something else; whether the method has the parameter is for the plan to say."""
        if name in RETIRED:
            return Misuse(*RETIRED[name], error=ParameterError)
        if name in HARMLESS:
            return Misuse(HARMLESS[name], "Remove it.", harmless=True)
        return elsewhere(name, None)

    def entries(self, name: str, pair: Pair) -> tuple[Entry, ...]:
        """The entries of one parameter; () when any part of it is wrong."""
        node = pair.value
        before = len(self.report.problems)
        if node.value is None:
            fix = f"Write {name}: and a value, or remove the line."
            self.report.problem(f"the parameter {name!r} has no value", pair.where, fix, ParameterError)
            return ()
        if _is_schedule(node):
            schedule = self.schedule(node)
            return (Entry(schedule, None, node.where),) if schedule else ()
        items = node.value if isinstance(node.value, tuple) else (node,)
        conditional = [item for item in items if isinstance(item.value, dict)]
        if conditional and len(conditional) < len(items):
            what = f"the list of {name!r} mixes plain values with mappings of filter and value"
            self.report.problem(what, node.where, "Write each entry as a mapping; one without a filter is for the rest.")
            return ()
        if conditional:
            entries = tuple(self.condition(item) for item in items)
        else:
            value = read_value(pair, Key(name, "value", ""), self.report)
            entries = (Entry(value, None, node.where) if value is not None else None,)
        return tuple(e for e in entries if e) if len(self.report.problems) == before else ()

    def condition(self, node: Node) -> Entry | None:
        assert isinstance(node.value, dict)
        if "value" not in node.value:
            what = f"a mapping here takes 'value' and 'filter', not {describe(node)}"
            fix = "Write a list of mappings: - {filter: mlp, value: 0.5}."
            if _is_schedule(node):
                fix = "Write - value: and the schedule behind it."
            self.report.problem(what, node.where, fix, ParameterError)
            return None
        found = self.level(node, CONDITION)
        if not found or "value" not in found:
            return None
        at = node.value["filter"].value.where if "filter" in found else ""
        return Entry(found["value"], found.get("filter"), node.value["value"].value.where, at)

    def value(self, pair: Pair, key: Key) -> Any:
        """The value of a condition: a scalar, a list of them, or a schedule."""
        if _is_schedule(pair.value):
            return self.schedule(pair.value)
        return read_value(pair, key, self.report)

    def schedule(self, node: Node) -> Schedule | None:
        assert isinstance(node.value, dict)
        before = len(self.report.problems)
        found = self.level(node, SCHEDULE)
        if not found or len(self.report.problems) > before:
            return None
        ((rule, setting),) = found.items()
        return Schedule(cast(Rule, rule), setting)


def _is_schedule(node: Node) -> bool:
    return isinstance(node.value, dict) and any(SCHEDULE.key(name) for name in node.value)
