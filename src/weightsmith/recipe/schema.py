"""The grammar as a JSON Schema, for editors: completion, hover text, red lines under unknown keys.

Made from the tables of `grammar.py` and the methods' own descriptions of their parameters. What a schema cannot say
well (which parameters one method takes, whether layer ranges match) is left to the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from weightsmith.recipe.grammar import CONDITION, INPUT, LEVELS, PATH, RECIPE, REFERENCE, SCHEDULE, SOURCE, Key, Level
from weightsmith.recipe.moe_grammar import MOE_LEVELS, UPCYCLING
from weightsmith.recipe.schedules import DECAYS, SCHEDULED
from weightsmith.recipe.single import DTYPE_NAMES
from weightsmith.recipe.surgery_grammar import SURGERY, SURGERY_LEVELS

_PATH_PATTERN = r"^[^+@]+(@[^+@]+)?$"
_REFERENCE_PATTERN = r"^[^+@]+(@[^+@]+)?([+][^+@]+(@[^+@]+)?)?$"
_NUMBER_PATTERN = r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$"
_OWN_METHOD_PATTERN = r"\.py:[A-Za-z_]\w*$"
_OWN_KEYS: dict[str, Any] = {"^(x-|_)": {}}


_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def _by_layer(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {"^[0-9]+$": value}, "additionalProperties": False, "minProperties": 1}


_TEXT = {"type": "string", "minLength": 1}
_EXPERTS = _list({"type": "integer", "minimum": 0})
_FORMS: dict[str, dict[str, Any]] = {
    "flag": {"type": "boolean"},
    "texts": {"anyOf": [_TEXT, _list(_TEXT)]},
    "experts": _EXPERTS,
    "experts_by_layer": _by_layer(_EXPERTS),
    "groups": _list(_EXPERTS),
    "groups_by_layer": _by_layer(_list(_EXPERTS)),
    "weights": _list(_list({"type": "number"})),
    "weights_by_layer": _by_layer(_list(_list({"type": "number"}))),
}
"""Kinds of values that need nothing of their key."""


class ParameterFacts(Protocol):
    """What the schema needs of a parameter: `weightsmith.methods` is imported after this room, not by it."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> Literal["float", "int", "bool", "str"]: ...
    @property
    def doc(self) -> str: ...
    @property
    def scope(self) -> Literal["model", "tensor"]: ...
    @property
    def minimum(self) -> float | None: ...
    @property
    def maximum(self) -> float | None: ...
    @property
    def choices(self) -> tuple[str, ...]: ...
    @property
    def booleans(self) -> tuple[str, ...]: ...


class MethodFacts(Protocol):
    """What the schema needs of a merge method."""

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> Sequence[ParameterFacts]: ...


def schema(methods: Sequence[MethodFacts]) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe for these methods.

    >>> schema([])["properties"]["dtype"]["anyOf"][0]["enum"][:2]
    ['bfloat16', 'torch.bfloat16']
    """
    return {"$schema": _DRAFT, "title": "weightsmith recipe", **_level(RECIPE, methods), "$defs": _definitions(methods)}


def moe_schema(methods: Sequence[MethodFacts]) -> dict[str, Any]:
    """JSON Schema of a recipe of `weightsmith moe`; methods: for merges that are made on the way.

    >>> moe_schema([])["$defs"]["upcycling"]["properties"]["gate_mode"]["anyOf"][0]["enum"][:2]
    ['router_input', 'hidden']
    """
    own = {level.name: _level(level, methods) for level in (RECIPE, *MOE_LEVELS, *SURGERY_LEVELS)}
    kinds = [{"$ref": f"#/$defs/{level.name}"} for level in (UPCYCLING, SURGERY)]
    title = "weightsmith moe recipe"
    return {"$schema": _DRAFT, "title": title, "anyOf": kinds, "$defs": {**own, **_definitions(methods)}}


def _definitions(methods: Sequence[MethodFacts]) -> dict[str, Any]:
    """Every mapping inside a recipe of a merge."""
    uses: dict[str, list[tuple[str, ParameterFacts]]] = {}
    for method in methods:
        for parameter in method.parameters:
            uses.setdefault(parameter.name, []).append((method.name, parameter))
    # One value for the output tensor means nothing under one of its models, so `parameters` there has fewer names.
    of_models = {name: found for name, found in uses.items() if any(p.scope == "model" for _, p in found)}
    return {
        **{level.name: _level(level, methods) for level in LEVELS if level not in (RECIPE, CONDITION)},
        "parameters": _parameters(uses),
        "model_parameters": _parameters(of_models),
        "names_of_parameters": {"propertyNames": {"enum": list(uses)}},
        "names_of_model_parameters": {"propertyNames": {"enum": list(of_models)}},
        "setting_of_own_method": _setting("", []),
        **{f"setting_{name}": _setting(name, [p for _, p in found]) for name, found in uses.items()},
    }


def _known_names(level: Level) -> dict[str, Any]:
    """Parameters anywhere in a mapping have names that some method knows."""
    inner: dict[str, Any] = {}
    for key in level.keys:
        if key.kind == "parameters":
            inner[key.name] = {"$ref": f"#/$defs/names_of_{'model_' if level in (INPUT, SOURCE) else ''}parameters"}
        elif key.of is not None and (found := _known_names(key.of)):
            inner[key.name] = {"list": {"items": found}, "named": {"additionalProperties": found}}.get(key.kind, found)
    return {"properties": inner} if inner else {}


def _level(level: Level, methods: Sequence[MethodFacts]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "type": "object",
        "description": level.doc,
        "properties": {key.name: _property(key, level, methods) for key in level.keys},
        "patternProperties": _OWN_KEYS,
        "additionalProperties": False,
    }
    required = [key.name for key in level.keys if key.required]
    if required:
        result["required"] = required
    if level.one_of:  # a key without a value counts as absent
        result["oneOf"] = [{"required": [n], "properties": {n: {"not": {"type": "null"}}}} for n in level.one_of]
    if level is RECIPE:  # only the code of an own method knows its parameters
        own = {"required": ["merge_method"], "properties": {"merge_method": {"type": "string", "pattern": _OWN_METHOD_PATTERN}}}
        result |= {"if": own, "else": _known_names(level)}
    return result


def _property(key: Key, level: Level, methods: Sequence[MethodFacts]) -> dict[str, Any]:
    value = _value(key, level, methods)
    if not key.required:
        value = {"anyOf": [value, {"type": "null"}]} if value else {}
    return {**value, "description": key.doc}


def _value(key: Key, level: Level, methods: Sequence[MethodFacts]) -> dict[str, Any]:
    if key.name == "merge_method":
        own = {"type": "string", "pattern": _OWN_METHOD_PATTERN, "description": "A function in a Python file: `./my.py:blend`."}
        return {"anyOf": [{"enum": [method.name for method in methods]}, own]}
    if key.kind == "text":
        return _TEXT
    if key.kind == "dtype":
        return {"enum": [name for dtype in DTYPE_NAMES for name in (dtype, f"torch.{dtype}")]}
    if key.kind in ("model", "path", "source"):
        mapping = PATH if key.kind == "path" else REFERENCE
        pattern = _PATH_PATTERN if key.kind == "path" else _REFERENCE_PATTERN
        merge = [{"$ref": f"#/$defs/{RECIPE.name}"}] if key.kind == "source" else []
        return {"anyOf": [{"type": "string", "pattern": pattern}, {"$ref": f"#/$defs/{mapping.name}"}, *merge]}
    if key.kind == "number":
        bounds = {"minimum": key.minimum, "maximum": key.maximum}
        return {"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}}
    if key.kind == "choice":
        return {"enum": list(key.choices)}
    if key.kind in _FORMS:
        return _FORMS[key.kind]
    if key.kind == "layer_range":
        return {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}
    if key.kind == "parameters":
        return {"$ref": "#/$defs/model_parameters" if level in (INPUT, SOURCE) else "#/$defs/parameters"}
    if key.kind == "share":
        return {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
    if key.kind == "count":
        return {"type": "integer", "minimum": 1}
    if key.kind == "decay":
        return {"enum": list(DECAYS)}
    if key.kind == "unused":
        return {}
    if key.kind == "refused":
        return {"not": {}}
    assert key.of is not None, f"a {key.kind} has a level"
    inner = {"$ref": f"#/$defs/{key.of.name}"}
    if key.kind == "section":
        return inner
    if key.kind == "list":
        return _list(inner)
    return {"type": "object", "additionalProperties": inner, "minProperties": 1}


def _parameters(uses: dict[str, list[tuple[str, ParameterFacts]]]) -> dict[str, Any]:
    properties = {}
    for name, found in uses.items():
        docs: dict[str, list[str]] = {}
        for method_name, parameter in found:
            docs.setdefault(parameter.doc, []).append(method_name)
        description = " ".join(f"{', '.join(names)}: {doc}" for doc, names in docs.items())
        properties[name] = {"$ref": f"#/$defs/setting_{name}", "description": description}
    own = {"$ref": "#/$defs/setting_of_own_method"}
    return {"type": "object", "properties": properties, "additionalProperties": own}


def _setting(name: str, parameters: Sequence[ParameterFacts]) -> dict[str, Any]:
    """All the forms of one parameter: a scalar, a gradient, a schedule, a value with a filter, a list of those.

    parameters  of this name, one for each method that has it; none for one that only its own method's code knows
    """
    scalars: list[dict[str, Any]] = []
    for parameter in parameters:
        scalars += [s for s in _scalars(parameter) if s not in scalars]
    scalar = scalars[0] if len(scalars) == 1 else {"anyOf": scalars} if scalars else {"type": ["number", "string", "boolean"]}
    scheduled = name == SCHEDULED and any(p.scope == "model" for p in parameters)
    schedules = [{"$ref": f"#/$defs/{SCHEDULE.name}"}] if scheduled else []
    docs = {key.name: key.doc for key in CONDITION.keys}
    condition = {
        "type": "object",
        "description": CONDITION.doc,
        "properties": {
            "filter": {"type": ["string", "null"], "description": docs["filter"]},
            "value": {"anyOf": [scalar, {"type": "array", "items": scalar}, *schedules], "description": docs["value"]},
        },
        "patternProperties": _OWN_KEYS,
        "required": ["value"],
        "additionalProperties": False,
    }
    lists = {"type": "array", "anyOf": [{"items": scalar}, {"items": condition}]}
    return {"anyOf": [scalar, condition, lists, *schedules]}


def _scalars(parameter: ParameterFacts) -> list[dict[str, Any]]:
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
    return [number, {"type": "string", "pattern": _NUMBER_PATTERN}]  # 1e-5 is text in YAML 1.1
