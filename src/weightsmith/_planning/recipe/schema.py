"""The grammar as a JSON Schema, for editors: completion, hover text, red lines under unknown keys.

Generated from the tables of the grammar and the methods' parameters. What a schema cannot express well
(which parameters one method takes, whether layer ranges match) is left to the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsmith._methods.method import Method, Parameter
from weightsmith._planning.recipe.grammar import LEVELS, MOE_LEVELS, RECIPE, SURGERY, UPCYCLING
from weightsmith._planning.recipe.kinds import NUMERAL, Level, Schema
from weightsmith._planning.recipe.records import NESTED, SCHEDULED
from weightsmith._planning.recipe.tuning import CHOOSABLE, or_choice, tuned_schemas
from weightsmith._planning.recipe.values import ANY_SCALAR, BLOCK_WEIGHTS, CONDITION, MODEL_PARAMETERS, PARAMETERS, SCHEDULE

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
