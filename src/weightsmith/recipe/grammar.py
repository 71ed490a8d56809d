"""The grammar of a merge recipe: the keys of each kind of mapping, what each key takes, and one sentence on it.

A key is added here alone, and a kind of value in the file of its like (see `kinds.py`): reading, the "it belongs there"
messages, the JSON Schema and the reference page all follow from the tables.
"""

from __future__ import annotations

from weightsmith.recipe.kinds import REFUSED, UNUSED, Key, Kind, Level, Walk, list_of
from weightsmith.recipe.nodes import Node, Pair, describe
from weightsmith.recipe.parameters import CONDITION, MODEL_PARAMETERS, PARAMETERS, SCHEDULE
from weightsmith.recipe.records import Input, Module, Recipe, Section, Slice
from weightsmith.recipe.references import MODEL, PATH, REFERENCE
from weightsmith.recipe.single import DTYPE, LAYER_RANGE, METHOD_NAME, TEXT

_MODEL = Key("model", MODEL, "The model: `path_or_hub_id[@revision]`; or a pattern, for all folders that match.", required=True)


def _input(section: Section) -> Input:
    layers = section.values.get("layer_range")
    at = section.at("layer_range") if layers else ""
    return Input(section.values["model"], layers, section.values.get("parameters", {}), section.where, at)


INPUT = Level(
    "input",
    "in an entry of 'models'",
    "One model of the merge, whole, or all that a pattern matches.",
    (_MODEL, Key("parameters", MODEL_PARAMETERS, "Parameters of this model alone; they win over all others.")),
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
    "A run of output layers; slices are stacked in order and layers numbered anew.",
    (
        Key("sources", list_of(SOURCE), "The layers of this slice, as many from each source.", required=True),
        Key("base_model", MODEL, "The base of this slice; the recipe's `base_model` otherwise."),
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
        walk.problem(f"{key.name!r} takes a mapping of names, not {describe(pair.value)}", pair.value.where, fix)
        return None
    if not value:
        walk.problem(f"{key.name!r} is empty", pair.value.where, "Write at least one module, under its name.")
        return None
    found = [(name, inner, walk.mapping(inner.value, MODULE)) for name, inner in value.items()]
    return tuple(Module(name, where=inner.where, **section.values) for name, inner, section in found if section is not None)


_MODULES_SCHEMA = {"type": "object", "additionalProperties": MODULE.schema, "minProperties": 1}
MODULES = Kind(_modules, _MODULES_SCHEMA, f"names, each with a {MODULE.words}", MODULE)

RECIPE = Level(
    "recipe",
    "at the top level",
    "A merge: exactly one of models, slices and modules.",
    (
        Key("merge_method", METHOD_NAME, "The method; `weightsmith methods` lists them.", required=True),
        Key("base_model", MODEL, "The model that deltas are taken from; also gives config and tokenizer."),
        _MODELS,
        _SLICES,
        Key("modules", MODULES, "Module name to its merge; `weightsmith plan` shows the names."),
        Key("parameters", PARAMETERS, "Parameters for all models and tensors."),
        Key("dtype", DTYPE, "Dtype of the output unless `out_dtype` is given."),
        Key("out_dtype", DTYPE, "Dtype of the output."),
        Key("name", TEXT, "A label; without effect."),
        Key("tokenizer_source", REFUSED, "Not supported yet: without it the base (else first) model's is copied."),
        Key("tokenizer", REFUSED, "Not supported yet: without it the base (else first) model's is copied."),
        Key("chat_template", REFUSED, "Not supported yet: without it the base (else first) model's is copied."),
    ),
    one_of=("models", "slices", "modules"),
)

LEVELS = (RECIPE, INPUT, SLICE, SOURCE, MODULE, REFERENCE, PATH, CONDITION, SCHEDULE)
"""Every kind of mapping, outermost first."""


def read_recipe(root: Node, text: str, walk: Walk) -> Recipe | None:
    """The recipe of a merge; None when its skeleton is not whole."""
    if root.value is None:
        walk.problem("the recipe is empty", root.where, "It needs merge_method and models, slices or modules.")
        return None
    section: Section | None = walk.mapping(root, RECIPE)
    if section is None or not walk.whole:
        return None
    assert isinstance(root.value, dict)
    positions = {name: pair.where for name, pair in root.value.items()}
    return Recipe(**section.values, text=text, filename=walk.filename, findings=tuple(walk.findings), positions=positions)
