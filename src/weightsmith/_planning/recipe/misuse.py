"""Keys that nothing reads: what mergekit did with each, and how to write what was meant.

mergekit ignores unknown keys at every level, so published recipes are full of settings that never took effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from weightsmith._base.errors import ParameterError, UnknownKey, Unsupported, WeightsmithError
from weightsmith._methods import TO_MOE
from weightsmith._planning.recipe.grammar import INPUT, LEVELS, RECIPE, SOURCE
from weightsmith._planning.recipe.kinds import NOT_IN_MIXTURES, Level
from weightsmith._planning.recipe.moe_grammar import SURGERY, UPCYCLING
from weightsmith._planning.recipe.nodes import Node, Pair, short

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
