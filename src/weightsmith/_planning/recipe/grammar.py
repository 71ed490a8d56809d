"""The grammar of a merge recipe: the keys of each kind of mapping, what each key takes, and one sentence on it.

A key is added here alone, and a kind of value in the file of its like (see `kinds.py`): reading, the "it belongs there"
messages, the JSON Schema and the reference page all follow from the tables.
"""

from __future__ import annotations

import hashlib
import json

from weightsmith._planning.recipe.kinds import UNUSED, Key, Kind, Level, Walk, list_of, section
from weightsmith._planning.recipe.nodes import Node, Pair, plain
from weightsmith._planning.recipe.parameters import CONDITION, MODEL_PARAMETERS, PARAMETERS, SCHEDULE
from weightsmith._planning.recipe.records import Input, ModelRef, Module, Recipe, Section, Slice, Tokenizer
from weightsmith._planning.recipe.references import MEASURED_ON, MODEL, PATH, REFERENCE, TEXT_FILE
from weightsmith._planning.recipe.single import DTYPE, LAYER_RANGE, METHOD_NAME, TEXT
from weightsmith._planning.recipe.tokenizers import LEVELS as TOKENIZER_LEVELS
from weightsmith._planning.recipe.tokenizers import SOURCE_OF_TOKENIZER, TOKENIZER

MAX_RECIPE_DEPTH = 8
"""Recipes inside recipes. Named recipes, one after the other, have no such limit."""

_CONTENTS = frozenset({"merge_method", "models", "slices", "modules"})


def _model(pair: Pair, key: Key, walk: Walk) -> ModelRef | None:
    """A model, or the recipe of one: equal recipes are one model."""
    if not isinstance(pair.value.value, dict) or _CONTENTS.isdisjoint(pair.value.value):
        reference: ModelRef | None = MODEL.read(pair, key, walk)
        return reference
    if walk.depth == MAX_RECIPE_DEPTH:
        fix = "Write the inner ones as documents of their own, with names, and --- between them."
        walk.problem(f"recipes inside recipes, more than {MAX_RECIPE_DEPTH} deep", pair.value.where, fix)
        return None
    walk.depth += 1
    text = json.dumps(plain(pair.value), indent=2, ensure_ascii=False) + "\n"  # YAML too, and read in a hundredth of the time
    recipe = read_recipe(pair.value, text, walk)
    walk.depth -= 1
    if recipe is None:
        return None
    path = f"recipe-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    walk.stages.setdefault(path, recipe)
    return ModelRef(path, "", _label(recipe), pair.value.where)


def _label(recipe: Recipe) -> str:
    """What its result is called: from its contents alone, because plans hold it."""
    names = ["a merge" if ref.path in recipe.stages else str(ref) for ref in recipe.references]
    names = [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names
    return f"the merge of {' and '.join(names)} by {recipe.merge_method}"


# RECIPE is further down, and its mappings hold models.
MODEL_OR_RECIPE = Kind(
    _model,
    {"anyOf": [*MODEL.schema["anyOf"], {"$ref": "#/$defs/recipe"}]},
    "a [model](#models), or a [recipe](#recipe) whose result is the model",
    REFERENCE,
)

_MODEL_DOC = "The model: `path_or_hub_id[@revision]`; or a pattern, for all folders that match."
_MODEL = Key("model", MODEL_OR_RECIPE, _MODEL_DOC, required=True)


def _input(section: Section) -> Input:
    layers = section.values.get("layer_range")
    at = section.at("layer_range") if layers else ""
    values = section.values
    return Input(values["model"], layers, values.get("parameters", {}), section.where, at, measured=values.get("text"))


INPUT = Level(
    "input",
    "in an entry of 'models'",
    "One model of the merge, whole, or all that a pattern matches.",
    (
        _MODEL,
        Key("parameters", MODEL_PARAMETERS, "Parameters of this model alone; they win over all others."),
        Key("text", MEASURED_ON, "The text that this model is measured on; wins over the recipe's."),
    ),
    make=_input,
)

SOURCE = Level(
    "source",
    "in an entry of 'sources'",
    "Some layers of one model.",
    (
        _MODEL,
        Key("layer_range", LAYER_RANGE, "`[first, end]`: layers first to end - 1, counted from 0.", required=True),
        Key("parameters", MODEL_PARAMETERS, "Parameters of this source alone; they win over all others."),
    ),
    make=_input,
)


def _slice(section: Section) -> Slice:
    values = section.values
    return Slice(values["sources"], values.get("base_model"), values.get("parameters", {}), section.where)


SLICE = Level(
    "slice",
    "in an entry of 'slices'",
    "A run of output layers; slices are stacked in order, and layers are renumbered.",
    (
        Key("sources", list_of(SOURCE), "The layers of this slice, as many from each source.", required=True),
        Key("base_model", MODEL_OR_RECIPE, "The base of this slice; the recipe's `base_model` otherwise."),
        Key("parameters", PARAMETERS, "Parameters of this slice."),
        Key("residual_weight", UNUSED, "Read by mergekit and never used."),
    ),
    make=_slice,
)

_MODELS = Key("models", list_of(INPUT), "The models to merge, whole.")
_SLICES = Key("slices", list_of(SLICE), "Runs of layers to merge or stack.")

MODULE = Level(
    "module",
    "in a module",
    "The merge of one module of a model of several (a language model, a vision tower).",
    (_MODELS, _SLICES, Key("parameters", PARAMETERS, "Parameters of this module.")),
    one_of=("models", "slices"),
)


def _modules(pair: Pair, key: Key, walk: Walk) -> tuple[Module, ...] | None:
    value = pair.value.value
    if not isinstance(value, dict):
        fix = "Write each module under its name: text_decoder: {models: [...]}."
        walk.wrong(pair.value, key, "a mapping of names", fix)
        return None
    if not value:
        walk.problem(f"{key.name!r} is empty", pair.value.where, "Write at least one module, under its name.")
        return None
    sections = [(name, inner, walk.mapping(inner.value, MODULE)) for name, inner in value.items()]
    return tuple(Module(name, where=inner.where, **section.values) for name, inner, section in sections if section is not None)


_MODULES_SCHEMA = {"type": "object", "additionalProperties": MODULE.schema, "minProperties": 1}
MODULES = Kind(_modules, _MODULES_SCHEMA, f"names, each with a {MODULE.words}", MODULE)

RECIPE = Level(
    "recipe",
    "at the top level",
    "A merge: exactly one of models, slices and modules.",
    (
        Key("merge_method", METHOD_NAME, "The method; `weightsmith methods` lists them.", required=True),
        Key("base_model", MODEL_OR_RECIPE, "The model that deltas are taken from; also gives config and tokenizer."),
        _MODELS,
        _SLICES,
        Key("modules", MODULES, "Module name to its merge; `weightsmith plan` shows the names."),
        Key("parameters", PARAMETERS, "Parameters for all models and tensors."),
        Key("dtype", DTYPE, "Dtype of the output unless `out_dtype` is given."),
        Key("out_dtype", DTYPE, "Dtype of the output."),
        Key("name", TEXT, "Other recipes of the file use its result as a model by this name: [stages](#stages)."),
        Key("tokenizer_source", SOURCE_OF_TOKENIZER, "Whose tokenizer the output has; see [tokenizers](tokenizers.md)."),
        Key("tokenizer", section(TOKENIZER), "The same, with choices for single tokens; instead of `tokenizer_source`."),
        Key(
            "chat_template",
            TEXT,
            "`auto` (the most frequent one), a [name](tokenizers.md#chat-templates), a file, or Jinja text.",
        ),
        Key("text", MEASURED_ON, "What models are measured on, for methods that look at a [text](statistics.md)."),
    ),
    one_of=("models", "slices", "modules"),
)

LEVELS = (RECIPE, INPUT, SLICE, SOURCE, MODULE, *TOKENIZER_LEVELS, REFERENCE, PATH, TEXT_FILE, CONDITION, SCHEDULE)
"""Every kind of mapping, outermost first."""


def read_recipe(root: Node, text: str, walk: Walk) -> Recipe | None:
    """The recipe of a merge; None if its skeleton is broken."""
    if root.value is None:
        walk.problem("the recipe is empty", root.where, "It needs merge_method and models, slices or modules.")
        return None
    section: Section | None = walk.mapping(root, RECIPE)
    if section is None or not walk.whole:
        return None
    assert isinstance(root.value, dict)
    positions = {name: pair.where for name, pair in root.value.items()}
    values = dict(section.values)
    source = values.pop("tokenizer_source", None)
    if source is not None and "tokenizer" in values:
        fix = "Keep one of them; 'source' inside 'tokenizer' says the same as 'tokenizer_source'."
        walk.problem("'tokenizer' and 'tokenizer_source' exclude each other", positions["tokenizer_source"], fix)
    elif source is not None:
        values["tokenizer"] = Tokenizer(source, section.at("tokenizer_source"))
    values |= {"measured": values.get("text"), "text": text}  # `Recipe.text` is the recipe itself
    fields = {**values, "filename": walk.filename, "findings": tuple(walk.findings)}
    return Recipe(**fields, positions=positions, stages=walk.stages)
