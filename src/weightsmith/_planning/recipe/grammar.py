"""The grammar of a merge recipe: the keys of each kind of mapping, what each key takes, and one sentence on it.

A key is added here alone, and a kind of value in the file of its like (see `kinds.py`): reading, the "it belongs there"
messages, the JSON Schema and the reference page all follow from the tables.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from weightsmith._base.errors import ParameterError
from weightsmith._methods.method import Method, Parameter
from weightsmith._planning.recipe.kinds import (
    DTYPE,
    FLAG,
    LAYER_RANGE,
    METHOD_NAME,
    NUMERAL,
    TEXT,
    TEXTS,
    UNUSED,
    Key,
    Kind,
    Level,
    Schema,
    Walk,
    choice,
    count,
    list_of,
    list_schema,
    number,
    section,
)
from weightsmith._planning.recipe.records import (
    NESTED,
    SCHEDULED,
    Expert,
    Input,
    ModelRef,
    Module,
    Recipe,
    Section,
    Slice,
    Surgery,
    Tokenizer,
    Upcycling,
)
from weightsmith._planning.recipe.tuning import CHOOSABLE, or_choice, tuned_schemas
from weightsmith._planning.recipe.values import (
    ANY_SCALAR,
    BLOCK_WEIGHTS,
    CONDITION,
    MEASURED_ON,
    MODEL,
    MODEL_PARAMETERS,
    PARAMETERS,
    PATH,
    REFERENCE,
    SCHEDULE,
    SOURCE_OF_TOKENIZER,
    TEXT_FILE,
    TOKENIZER,
)
from weightsmith._planning.recipe.values import LEVELS as TOKENIZER_LEVELS
from weightsmith._planning.recipe.yaml import Node, Pair, float_of, plain

MAX_RECIPE_DEPTH = 8
"""Recipes inside recipes. Named recipes, one after the other, have no such limit."""

_CONTENTS = frozenset({"merge_method", "models", "slices", "modules"})


def _model(pair: Pair, key: Key, walk: Walk) -> ModelRef | None:
    """A model, or the recipe of one: equal recipes are one model."""
    if not isinstance(pair.value.value, dict) or _CONTENTS.isdisjoint(pair.value.value):
        return MODEL.read(pair, key, walk)
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

LEVELS = (
    *(RECIPE, INPUT, SLICE, SOURCE, MODULE, *TOKENIZER_LEVELS, REFERENCE, PATH, TEXT_FILE),
    *(CONDITION, BLOCK_WEIGHTS, SCHEDULE),
)
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


# ---- The grammar of `weightsmith moe`, like `grammar.py`, and what its recipes become


# ---- The kinds of lists of numbers: which experts, in which groups, with which weights; perhaps layer by layer.

_EXAMPLES = {1: "[0, 2, 5]", 2: "[[0, 3], [1, 2]]"}


def _lists(depth: int, *, whole: bool) -> tuple[Kind, Kind]:
    """The kind of numbers in `depth` levels of lists, none of them empty; and that of a mapping of layers to these.

    whole  expert numbers, from 0 on; else any finite numbers
    """
    example = f"Write {_EXAMPLES[depth]}."

    def number(node: Node, key: Key, walk: Walk) -> float | None:
        value = node.value
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float_of(value)):
            if not whole or (value == int(value) and value >= 0):
                return int(value) if whole else float(value)
        what = "whole numbers from 0 on" if whole else "finite numbers"
        fix = "Write numbers from 0 on." if whole else ""
        walk.wrong(node, key, what, fix, ParameterError)
        return None

    def listed(node: Node, key: Key, walk: Walk, levels: int = depth) -> Any:
        if levels == 0:
            return number(node, key, walk)
        if not isinstance(node.value, tuple):
            what = "a list of numbers" if levels == 1 else "a list of lists of numbers"
            walk.wrong(node, key, what, example)
            return None
        if not node.value:
            what = f"a group in {key.name!r} is empty" if levels < depth else f"{key.name!r} is empty"
            walk.problem(what, node.where, example)
            return None
        read = [listed(item, key, walk, levels - 1) for item in node.value]
        return None if None in read else tuple(read)

    def by_layer(pair: Pair, key: Key, walk: Walk) -> dict[str, Any] | None:
        value = pair.value.value
        if not isinstance(value, dict) or not value:
            fix = f"Write each layer under its number: {{0: {_EXAMPLES[depth]}}}."
            walk.wrong(pair.value, key, "a mapping of layers", fix)
            return None
        lists = {layer: listed(inner.value, key, walk) for layer, inner in value.items()}
        return None if None in lists.values() else lists

    schema: Schema = {"type": "integer", "minimum": 0} if whole else {"type": "number"}
    for _ in range(depth):
        schema = list_schema(schema)
    layers = {"type": "object", "additionalProperties": schema, "minProperties": 1}
    words = f"a list of {'lists of ' * (depth - 1)}{'expert numbers' if whole else 'numbers'}"
    every = Kind(lambda pair, key, walk: listed(pair.value, key, walk), schema, words)
    return every, Kind(by_layer, layers, f"layers, each with {words}")


EXPERTS, EXPERTS_BY_LAYER = _lists(1, whole=True)
GROUPS, GROUPS_BY_LAYER = _lists(2, whole=True)
WEIGHTS, WEIGHTS_BY_LAYER = _lists(2, whole=False)


def _model_or_merge(pair: Pair, key: Key, walk: Walk) -> ModelRef | Recipe | None:
    model: ModelRef | None = MODEL_OR_RECIPE.read(pair, key, walk)
    return model and (walk.stages.get(model.path) or model)


MODEL_OR_MERGE = Kind(_model_or_merge, MODEL_OR_RECIPE.schema, MODEL_OR_RECIPE.words)

# ---- dense models in, a mixture of experts out

GATE_MODES = ("router_input", "hidden", "hidden_avg", "hidden_last", "cheap_embed", "random", "uniform_random")
"""How router weights are made; the first is used when none is named."""


def _expert(section: Section) -> tuple[Expert, ...]:
    """The experts of an entry: one for each copy."""
    values = dict(section.values)
    copies: int = values.pop("copies", 1)
    return (Expert(values.pop("source_model"), section, **values),) * copies


EXPERT = Level(
    "expert",
    "in an entry of 'experts'",
    "One expert: a dense model whose MLP it gets, and the prompts it is for.",
    (
        Key("source_model", MODEL_OR_MERGE, "The model whose MLP becomes the expert, or a recipe of a merge.", required=True),
        Key("positive_prompts", TEXTS, "What the expert is for: its router weights come from these."),
        Key("negative_prompts", TEXTS, "What it is not for."),
        Key(
            "prompts_file",
            TEXT,
            "Text file of further positive prompts: one a paragraph, or cut by `prompt_tokens`. A relative path starts at the "
            "recipe's folder. `own`: what the model writes by itself, 20 rows of `prompt_tokens` or 128 tokens.",
        ),
        Key("held_out_file", TEXT, "Text file in the same format, used only for the routing report."),
        Key("noise_scale", number(0), "Standard deviation of normal noise added to its weights."),
        Key("noise_fraction", number(0, 1), "Share of its weights, at random, that get noise; 1 by default."),
        Key(
            "drop_fraction",
            number(0, 1),
            "Drop-Upcycling: share of its neurons, chosen at random, that are redrawn from a normal distribution like theirs.",
        ),
        Key("residual_scale", number(), "Factor on its down projection, after the noise."),
        Key(
            "copies", count(maximum=1024), "Number of experts to create from this entry, each with its own noise; 1 by default."
        ),
    ),
    make=_expert,
)

UPCYCLING = Level(
    "upcycling",
    "at the top level",
    "A mixture of experts built from dense models.",
    (
        Key(
            "base_model",
            MODEL_OR_MERGE,
            "Attention, norms, embeddings and tokenizer: a model, or a recipe of a merge.",
            required=True,
        ),
        Key("experts", list_of(EXPERT), "The experts, in the order of the router's rows.", required=True),
        Key("shared_experts", list_of(EXPERT), "Experts that every token goes through, where the architecture has them."),
        Key("architecture", TEXT, "Of the output; by default the first that can hold these models."),
        Key("gate_mode", choice(GATE_MODES), "How router weights are made; router_input by default."),
        Key("prompt_tokens", count(), "Cut the text files of prompts into rows of so many tokens instead of paragraphs."),
        Key("router_scale", number(0), "Factor on all router weights; 1 by default."),
        Key(
            "virtual_groups",
            count(),
            "Cut each MLP into so many experts, which the router chooses together; `experts_per_token` is a multiple of it.",
        ),
        Key("experts_per_token", count(), "Experts that each token is sent to; 2 by default, 1 of one."),
        Key("dtype", DTYPE, "Dtype of the output; the base's by default."),
        Key("name", TEXT, "A label; without effect."),
    ),
)

# ---- a smaller mixture out of a mixture

ROUTERS = ("first", "mean")
"""Which router row a merged expert gets; the first is used when none is named."""

PRUNE = Level(
    "prune_experts",
    "in 'prune_experts'",
    "The experts to keep. They are renumbered in this order.",
    (
        Key("keep", EXPERTS, "The experts that stay, the same in every layer: `[0, 2, 5]`."),
        Key("keep_by_layer", EXPERTS_BY_LAYER, "Layer to the experts that stay there, as many in each layer."),
        Key("saliency", TEXT, "JSON file, layer to one number for each expert: those with the largest stay."),
        Key("experts", count(), "With `saliency`: how many stay in each layer."),
    ),
    one_of=("keep", "keep_by_layer", "saliency"),
)

MERGE = Level(
    "merge_experts",
    "in 'merge_experts'",
    "Which experts are averaged into one. Groups become the new experts, in this order.",
    (
        Key("groups", GROUPS, "The groups, the same in every layer: `[[0, 3], [1, 2]]`. Each expert is in one."),
        Key("groups_by_layer", GROUPS_BY_LAYER, "Layer to its groups, as many in each layer."),
        Key("weights", WEIGHTS, "A weight for each expert of each of the `groups`; equal ones by default."),
        Key("weights_by_layer", WEIGHTS_BY_LAYER, "The same for `groups_by_layer`."),
        Key("match", FLAG, "Reorder the neurons of each expert to match the group's first; false by default."),
        Key("router", choice(ROUTERS), "Router row of a merged expert: its group's `first` (default) or their `mean`."),
    ),
    one_of=("groups", "groups_by_layer"),
)

SURGERY = Level(
    "surgery",
    "at the top level",
    "A smaller mixture of experts, made from an existing one.",
    (
        Key("model", MODEL, "The mixture of experts: `path_or_hub_id[@revision]`.", required=True),
        Key("prune_experts", section(PRUNE), "Leave experts out."),
        Key("merge_experts", section(MERGE), "Average experts."),
        Key("dtype", DTYPE, "Dtype of the output; as stored by default."),
        Key("name", TEXT, "A label; without effect."),
    ),
    one_of=("prune_experts", "merge_experts"),
)

MOE_LEVELS = (UPCYCLING, EXPERT, SURGERY, PRUNE, MERGE)
"""Every kind of mapping that only `weightsmith moe` has."""


def read_moe(root: Node, text: str, walk: Walk) -> Upcycling | Surgery | None:
    """The recipe of a mixture; None if its skeleton is broken. The top-level keys decide which kind it is."""
    smaller = isinstance(root.value, dict) and not root.value.keys().isdisjoint(SURGERY.one_of)
    section: Section | None = walk.mapping(root, SURGERY if smaller else UPCYCLING)
    if section is None or not walk.whole:
        return None
    values = dict(section.values)
    values.pop("name", None)
    values |= {"section": section, "text": text, "filename": walk.filename, "findings": tuple(walk.findings)}
    if smaller:
        return Surgery(prune=values.pop("prune_experts", None), merge=values.pop("merge_experts", None), **values)
    experts, shared = (tuple(e for entry in values.pop(key, ()) for e in entry) for key in ("experts", "shared_experts"))
    values.setdefault("experts_per_token", min(2, len(experts) * values.get("virtual_groups", 1)))
    return Upcycling(values.pop("base_model"), experts, shared_experts=shared, **values)


# ---- The grammar as a JSON Schema, for editors: completion, hover text, red lines under unknown keys


_DRAFT = "https://json-schema.org/draft/2020-12/schema"
NUMBER: Schema = {"anyOf": [{"type": "number"}, NUMERAL]}
_OWN_METHOD = {"type": "string", "pattern": r"\.py:[A-Za-z_]\w*$"}


def schema(methods: Sequence[Method]) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe for these methods.

    >>> schema([])["properties"]["dtype"]["anyOf"][0]["enum"][:2]
    ['bfloat16', 'torch.bfloat16']
    """
    return {"$schema": _DRAFT, "title": "weightsmith recipe", **_level(RECIPE), "$defs": _definitions(LEVELS, methods)}


def moe_schema(methods: Sequence[Method]) -> dict[str, Any]:
    """JSON Schema of a recipe of `weightsmith moe`; methods: for merges used as models.

    >>> moe_schema([])["$defs"]["upcycling"]["properties"]["gate_mode"]["anyOf"][0]["enum"][:2]
    ['router_input', 'hidden']
    """
    definitions = _definitions((*MOE_LEVELS, *LEVELS), methods)
    title = "weightsmith moe recipe"
    return {"$schema": _DRAFT, "title": title, "anyOf": [UPCYCLING.schema, SURGERY.schema], "$defs": definitions}


def _level(level: Level) -> dict[str, Any]:
    properties = {}
    for key in level.keys:
        value = or_choice(key.kind.schema) if key.name in CHOOSABLE else key.kind.schema
        if value and not key.required:  # a key without a value counts as absent
            value = {"anyOf": [value, {"type": "null"}]}
        properties[key.name] = {**value, "description": key.doc}
    result: dict[str, Any] = {
        "type": "object",
        "description": level.doc,
        "properties": properties,
        "patternProperties": {"^(x-|_)": {}},
        "additionalProperties": False,
    }
    required = [key.name for key in level.keys if key.required]
    if required:
        result["required"] = required
    if level.one_of:
        result["oneOf"] = [{"required": [n], "properties": {n: {"not": {"type": "null"}}}} for n in level.one_of]
    if level is RECIPE:  # only the code of an own method knows its parameters
        own_method = {"required": ["merge_method"], "properties": {"merge_method": _OWN_METHOD}}
        result |= {"if": own_method, "else": _known_names(level)}
    return result


def _known_names(level: Level) -> Schema:
    """Parameters anywhere in a mapping have names that some method knows."""
    inner: dict[str, Any] = {}
    for key in level.keys:
        if key.kind in (PARAMETERS, MODEL_PARAMETERS):
            inner[key.name] = {"$ref": f"#/$defs/names_of_{'model_' if key.kind is MODEL_PARAMETERS else ''}parameters"}
        elif key.kind.of is not None and (names_within := _known_names(key.kind.of)):
            within = {"array": "items", "object": "additionalProperties"}.get(key.kind.schema.get("type", ""))
            inner[key.name] = {within: names_within} if within else names_within
    return {"properties": inner} if inner else {}


def _definitions(levels: Sequence[Level], methods: Sequence[Method]) -> dict[str, Any]:
    """The levels, the names of the methods, and the parameters by name."""
    uses: dict[str, list[tuple[str, Parameter]]] = {}
    for method in methods:
        for parameter in method.parameters:
            uses.setdefault(parameter.name, []).append((method.name, parameter))
    # One value for the output tensor means nothing under one of its models, so `parameters` there has fewer names.
    of_models = {name: parameters for name, parameters in uses.items() if any(p.scope == "model" for _, p in parameters)}
    own_method = {**_OWN_METHOD, "description": "A function in a Python file: `./my.py:blend`."}
    return {
        **{level.name: _level(level) for level in levels if level is not CONDITION},  # that one differs by parameter
        "names_of_methods": {"anyOf": [{"enum": [method.name for method in methods]}, own_method]},
        "parameters": _parameters(uses),
        "model_parameters": _parameters(of_models),
        "names_of_parameters": {"propertyNames": {"enum": list(uses)}},
        "names_of_model_parameters": {"propertyNames": {"enum": list(of_models)}},
        **_settings("of_own_method", "", []),
        **{
            key: definition
            for name, parameters in uses.items()
            for key, definition in _settings(name, name, [p for _, p in parameters]).items()
        },
    }


def _parameters(uses: Mapping[str, list[tuple[str, Parameter]]]) -> dict[str, Any]:
    properties = {}
    for name, parameters in uses.items():
        docs: dict[str, list[str]] = {}
        for method_name, parameter in parameters:
            docs.setdefault(parameter.doc, []).append(method_name)
        description = " ".join(f"{', '.join(names)}: {doc}" for doc, names in docs.items())
        properties[name] = {"$ref": f"#/$defs/setting_{name}", "description": description}
    unknown = {"$ref": "#/$defs/setting_of_own_method"}
    return {"type": "object", "properties": properties, "additionalProperties": unknown}


def _settings(key: str, name: str, parameters: Sequence[Parameter]) -> dict[str, Any]:
    """`setting_KEY`: all the forms of one parameter: a value, a gradient, a schedule, a value with a filter, a list of those.
    `value_KEY`: a scalar, or one to tune.

    parameters  of this name, one for each method that has it; none for one that only its own method's code knows
    """
    if name == NESTED:
        values = [ANY_SCALAR, *tuned_schemas(ANY_SCALAR, NUMBER)]
        return {f"setting_{key}": {"type": "object", "additionalProperties": {"anyOf": values}}}
    scalars = _scalars(parameters)
    scalar: Schema = scalars[0] if len(scalars) == 1 else {"anyOf": scalars} if scalars else ANY_SCALAR
    numbers = _scalars([parameter for parameter in parameters if parameter.kind in ("int", "float")])
    number = {"anyOf": numbers} if numbers else None if parameters else NUMBER
    value = {"$ref": f"#/$defs/value_{key}"}
    scheduled = name == SCHEDULED and any(p.scope == "model" for p in parameters)
    schedules = [SCHEDULE.schema] if scheduled else []
    condition = _level(CONDITION)
    condition["properties"]["value"] |= {"anyOf": [value, {"type": "array", "items": value, "minItems": 1}, *schedules]}
    lists = {
        "type": "array",
        "minItems": 1,
        "anyOf": [{"items": value}, {"items": {"anyOf": [condition, BLOCK_WEIGHTS.schema]}}],
    }
    return {
        f"value_{key}": {"anyOf": [scalar, *tuned_schemas(scalar, number)]},
        f"setting_{key}": {"anyOf": [value, condition, BLOCK_WEIGHTS.schema, lists, *schedules]},
    }


def _scalars(parameters: Sequence[Parameter]) -> list[Schema]:
    """The forms of a scalar of any of them, each once."""
    scalars: list[Schema] = []
    for parameter in parameters:
        scalars += [scalar for scalar in _scalars_of(parameter) if scalar not in scalars]
    return scalars


def _scalars_of(parameter: Parameter) -> list[Schema]:
    if parameter.kind == "bool":
        return [{"type": "boolean"}]
    if parameter.kind == "str":
        text: dict[str, Any] = {"enum": list(parameter.choices)} if parameter.choices else {"type": "string"}
        return [text, {"type": "boolean"}] if parameter.booleans else [text]
    number: dict[str, Any] = {"type": "number"}  # an int parameter too: its gradients hold any number
    if parameter.minimum is not None:
        number["minimum"] = parameter.minimum
    if parameter.maximum is not None:
        number["maximum"] = parameter.maximum
    return [number, NUMERAL]
