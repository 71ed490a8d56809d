"""Reads the mappings of a recipe by the grammar and collects all problems.

A wrong value is reported and left out, and reading continues, so that the planner can add its own findings. There is no recipe
if its skeleton (method, models, layers) is broken, because the planner would report misspelled keys as missing.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import ParameterError, UnknownKey, Unsupported, WeightsmithError
from weightsmith._methods import TO_MOE
from weightsmith._planning.recipe.grammar import INPUT, LEVELS, RECIPE, SOURCE, SURGERY, UPCYCLING
from weightsmith._planning.recipe.kinds import NOT_IN_MIXTURES, Level, Walk
from weightsmith._planning.recipe.records import ModelRef, Recipe, Section, Setting
from weightsmith._planning.recipe.yaml import Document, Node, Pair, describe, short

# ---- Keys that nothing reads: what mergekit did with each, and how to write what was meant


IGNORED = "mergekit silently ignored it"

RETIRED = {
    "embed_slerp": (
        "embed_slerp has had no effect in mergekit since its tokenizer code was rewritten",
        "Remove it; for spherical interpolation of all tensors, embeddings too, use merge_method: slerp.",
    ),
    "input_model_parameters": (
        "input_model_parameters is read by no version of mergekit, though its README named it",
        "Write 'parameters:' in each entry of 'models' or 'sources'.",
    ),
}
"""Settings that older pages recommend but nothing reads: the error and the next step."""

HARMLESS = {
    "int8_mask": "int8_mask never changes the result: it only chose the type of an intermediate in mergekit",
    "int_space": "int_space is read by no version of mergekit and has no effect",
}
"""Keys that never change the result: the warning."""

_NOTES = frozenset(
    "author authors comment comments date description license metadata name note notes tags title version".split()
)
_SYNONYMS = {
    "base": "base_model",
    "layers": "layer_range",
    "method": "merge_method",
    "model_path": "model",
    "modles": "models",  # by its letters closer to "modules"
    "output_dtype": "out_dtype",
    "params": "parameters",
    "range": "layer_range",
    "torch_dtype": "dtype",
}
OPTIONS = {
    "allow_crimes": "",
    "clone_tensors": "",
    "copy_tokenizer": "",
    "cuda": "",
    "lazy_unpickle": "",
    "low_cpu_memory": "",
    "max_shard_size": "--max-shard-size",
    "out_shard_size": "--max-shard-size",
    "random_seed": "--seed",
    "seed": "--seed",
    "trust_remote_code": "",
    "write_model_card": "",
}
"""Options of commands that recipes name as keys, and their flags; "" for those that nothing needs."""


_OF_TOKENS = frozenset({"source", "tokens", "token", "kind", "force"})
"""Keys inside `tokenizer` whose names are too common to guess that a stray one belongs there."""


@dataclass(frozen=True, slots=True)
class Misuse:
    """What is wrong with one key.

    harmless  it could not have changed the result: a warning, not an error
    meant     the key that was probably meant, "" when it is not clear
    """

    what: str
    fix: str
    error: type[WeightsmithError] = UnknownKey
    harmless: bool = False
    meant: str = ""


def explain(name: str, pair: Pair, level: Level, siblings: Mapping[str, Pair], parameter_names: Collection[str]) -> Misuse:
    """The message for a key that its level does not have. siblings: the mapping it is in."""
    shown = short(name)
    if name in HARMLESS:
        return Misuse(HARMLESS[name], "Remove it.", harmless=True)
    if name in RETIRED:
        return Misuse(*RETIRED[name], error=ParameterError)
    if name == "revision" and level in (INPUT, SOURCE):
        return _revision(pair.value, siblings)
    if name == "lora" and level in (INPUT, SOURCE):
        return _lora(pair.value, siblings)
    if name in parameter_names:
        return _misplaced(name, pair.value, level)
    if name in NOT_IN_MIXTURES and level in (UPCYCLING, SURGERY):
        return Misuse(*NOT_IN_MIXTURES[name], error=Unsupported)
    if level is RECIPE and any(other.key(name) for other in (UPCYCLING, SURGERY)):
        return Misuse(f"the key {name!r} is of a recipe of `weightsmith moe`", TO_MOE)
    option = OPTIONS.get(name.replace("-", "_")) if level is RECIPE else None
    if option is not None:
        what = f"{shown!r} is a command-line option, not a key of a recipe; {IGNORED}"
        fix = f"Remove it and pass {option} on the command line." if option else "Remove it: nothing needs it."
        return Misuse(what, fix, harmless=option != "--seed")
    if name in _NOTES:
        fix = "Remove it, or write it as a comment or as x-" + name + "."
        return Misuse(f"the key {shown!r} {level.place} has no effect", fix, harmless=True)
    return elsewhere(name, level) or _unknown(name, level, parameter_names)


def elsewhere(name: str, level: Level | None) -> Misuse | None:
    """The message for a key that only other levels have; None if none has it. Without a level: `parameters`."""
    homes = [other for other in LEVELS if other.key(name) and name not in _OF_TOKENS]
    if not homes:
        return None
    place = level.place if level else "inside 'parameters'"
    what = f"the key {name!r} has no meaning {place}; {IGNORED}"
    places = [other.place if level is None or other.place != level.place else "in a recipe of a merge" for other in homes]
    fix = f"Move it: it belongs {' or '.join(places)}."
    if name == "merge_method":
        what = f"one recipe has one merge_method, not one {place}; {IGNORED}"
        fix = "Write one recipe per method and name the output of the first as a model of the next."
    if name == "layer_range" and level is INPUT:
        what = f"'layer_range' {level.place}: mergekit ignored it and merged all layers"
        fix = "Write 'slices' with 'sources' instead of 'models', to merge some layers."
    return Misuse(what, fix)


def _revision(value: Node, siblings: Mapping[str, Pair]) -> Misuse:
    model = siblings["model"].value.value if "model" in siblings else None
    ref = short(model) if isinstance(model, str) else "org/name"
    revision = value.value if isinstance(value.value, str) else "revision"
    what = f"'revision' beside 'model': mergekit ignored it and used the main branch, not {short(revision)!r}"
    return Misuse(what, f"Write model: {ref}@{short(revision)}.")


def _lora(value: Node, siblings: Mapping[str, Pair]) -> Misuse:
    model = siblings["model"].value.value if "model" in siblings else None
    ref = short(model) if isinstance(model, str) else "org/name"
    adapter = short(value.value) if isinstance(value.value, str) else "adapter"
    return Misuse(
        "'lora' beside 'model': mergekit ignored it and used the model without its adapter", f"Write model: {ref}+{adapter}."
    )


def _misplaced(name: str, value: Node, level: Level) -> Misuse:
    what = f"the parameter {name!r} {level.place} must be inside 'parameters'; {IGNORED}"
    if not level.key("parameters"):
        return Misuse(what, "Write it under a 'parameters:' key.", ParameterError)
    scalar = isinstance(value.value, int | float)
    written = f"{name}: {str(value.value).lower()}" if scalar else f"{name}: ..."
    where = "at the top level" if level is RECIPE else "in the same mapping"
    return Misuse(what, f"Write parameters: {{{written}}} {where}.", ParameterError)


def _unknown(name: str, level: Level, parameter_names: Collection[str]) -> Misuse:
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    plain = _SYNONYMS.get(plain, plain)
    close = difflib.get_close_matches(plain, [*level.names, *parameter_names], n=1)
    if not close:
        fix = f"Write one of {', '.join(level.names)}; keys of your own start with x- or _."
        return Misuse(f"unknown key {short(name)!r} {level.place}; {IGNORED}", fix)
    (meant,) = close
    what = f"unknown key {short(name)!r} {level.place} (did you mean {meant!r}?); {IGNORED}"
    if meant in parameter_names:
        return Misuse(what, f"Write {meant!r} under a 'parameters:' key.", ParameterError, meant=meant)
    return Misuse(what, f"Write {meant!r}.", meant=meant)


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
