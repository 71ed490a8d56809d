"""The parameters of a recipe: values, gradients, filters, schedules; the kinds of values that hold them."""

from __future__ import annotations

import itertools
import json
import math
from typing import cast

from weightsmith._base.errors import ParameterError
from weightsmith._planning.recipe.kinds import DECAY, FILTER, SHARE, Key, Kind, Level, Walk, count, list_schema
from weightsmith._planning.recipe.records import NESTED, Entry, Rule, Schedule, Section, Setting, numeric
from weightsmith._planning.recipe.yaml import Node, Pair, Scalar, describe, float_of

# ---- schedules

SCHEDULE = Level(
    "schedule",
    "in a schedule of weights",
    "Weights over the checkpoints of a run, oldest first.",
    (
        Key("ema", SHARE, "Exponential moving average: the share of the average that each checkpoint keeps."),
        Key("lawa", count(), "The mean of the last k checkpoints."),
        Key("wsm", DECAY, "The learning rate curve whose effect the mean is to have."),
    ),
    one_of=("ema", "lawa", "wsm"),
)


def _is_schedule(node: Node) -> bool:
    return isinstance(node.value, dict) and any(SCHEDULE.key(name) for name in node.value)


def _schedule(node: Node, walk: Walk) -> Schedule | None:
    before = len(walk.problems)
    section: Section | None = walk.mapping(node, SCHEDULE)
    if not section or not section.values or len(walk.problems) > before:
        return None
    ((rule, setting),) = section.values.items()
    return Schedule(cast(Rule, rule), setting)


# ---- values


def _scalar(node: Node, name: str, walk: Walk) -> Scalar | None:
    value = node.value
    if value is None or isinstance(value, dict | tuple):
        what = f"{name} takes a number, true, false or a text, not {describe(node)}"
        walk.problem(what, node.where, "Write one value, such as 0.5.", ParameterError)
        return None
    if isinstance(value, int | float) and not math.isfinite(float_of(value)):
        what = f"{name} is {describe(value).removeprefix('the number ')}; a value must be finite"
        walk.problem(what, node.where, "Write a finite number.", ParameterError)
        return None
    return value


def _value(node: Node, name: str, walk: Walk) -> Scalar | tuple[Scalar, ...] | Schedule | None:
    if _is_schedule(node):
        return _schedule(node, walk)
    if not isinstance(node.value, tuple):
        return _scalar(node, repr(name), walk)
    if not node.value:
        fix = f"Write one value, {name}: 0.5, or values from the first layer to the last, {name}: [0.2, 0.8]."
        walk.problem(f"the list of {name!r} is empty", node.where, fix, ParameterError)
        return None
    read = [_scalar(item, f"an entry of {name!r}", walk) for item in node.value]
    values = tuple(v for v in read if v is not None)
    return values if len(values) == len(read) else None


ANY_SCALAR = {"type": ["number", "string", "boolean"]}
VALUE = Kind(
    lambda pair, key, walk: _value(pair.value, key.name, walk),
    {"anyOf": [ANY_SCALAR, list_schema(ANY_SCALAR), SCHEDULE.schema]},
    "a number, `true`, `false` or text; a list of them; or a [schedule](#schedule)",
)


def _entry(section: Section) -> Entry:
    pattern = section.values.get("filter")
    return Entry(section.values["value"], pattern, section.at("value"), "" if pattern is None else section.at("filter"))


CONDITION = Level(
    "condition",
    "in a value with a filter",
    "A value for the tensors whose name holds `filter`; the first that fits counts.",
    (
        Key("filter", FILTER, "Part of a tensor name, case-sensitive; `*` or none: every tensor."),
        Key("value", VALUE, "A scalar, a list (a gradient over the layers of the slice), or a schedule.", required=True),
    ),
    make=_entry,
)


def _condition(node: Node, walk: Walk) -> Entry | None:
    assert isinstance(node.value, dict)
    if "value" in node.value:
        entry: Entry | None = walk.mapping(node, CONDITION)
        return entry
    what = f"a mapping here takes 'value' and 'filter', not {describe(node)}"
    fix = "Write a list of mappings: - {filter: mlp, value: 0.5}."
    if _is_schedule(node):
        fix = "Write - value: and the schedule behind it."
    walk.problem(what, node.where, fix, ParameterError)
    return None


# ---- parameters


def _entries(name: str, pair: Pair, walk: Walk) -> tuple[Entry, ...]:
    """The entries of one parameter; () if any part of it is wrong."""
    node = pair.value
    before = len(walk.problems)
    if node.value is None:
        fix = f"Write {name}: and a value, or remove the line."
        walk.problem(f"the parameter {name!r} has no value", pair.where, fix, ParameterError)
        return ()
    if name == NESTED and isinstance(node.value, dict):
        return _nested(name, node, walk)
    items = node.value if isinstance(node.value, tuple) else (node,)
    conditions = [item for item in items if isinstance(item.value, dict)]
    entries: list[Entry | None]
    if not conditions or _is_schedule(node):
        value = _value(node, name, walk)
        entries = [Entry(value, None, node.where)] if value is not None else []
    elif len(conditions) < len(items):
        what = f"the list of {name!r} mixes plain values with mappings of filter and value"
        walk.problem(what, node.where, "Write each entry as a mapping; one without a filter is for the rest.")
        return ()
    else:
        entries = [_condition(item, walk) for item in items]
    return tuple(e for e in entries if e) if len(walk.problems) == before else ()


def _nested(name: str, node: Node, walk: Walk) -> tuple[Entry, ...]:
    """A mapping of plain values, as one value."""
    assert isinstance(node.value, dict)
    before, values = len(walk.problems), dict[str, Scalar]()
    for inner, pair in node.value.items():
        value = _scalar(pair.value, f"{inner!r} in {name!r}", walk)
        if value is not None:
            number = numeric(value) if isinstance(value, str) else None
            values[inner] = value if number is None else number
    return (Entry(json.dumps(values), None, node.where),) if len(walk.problems) == before else ()


def _has_decimal_comma(parameters: dict[str, Pair], walk: Walk) -> bool:
    """Reports `{weight: 0,5}`, which YAML reads as weight: 0 and a parameter 5 without a value."""
    names = [*parameters]
    for before, name in itertools.pairwise(names):
        whole = parameters[before].value.value
        if name.isdecimal() and parameters[name].value.value is None and type(whole) is int:
            what = f"{before}: {whole},{name} has a decimal comma, which ends the value in YAML"
            walk.problem(what, parameters[before].where, f"Write {before}: {whole}.{name}.", ParameterError)
            return True
    return False


def _parameters(pair: Pair, key: Key, walk: Walk) -> dict[str, Setting] | None:
    if not isinstance(pair.value.value, dict):
        what = f"'parameters' takes a mapping of names to values, not {describe(pair.value)}"
        walk.problem(what, pair.value.where, "Write parameters: {weight: 0.5}.")
        walk.whole = False  # the plan would report each required parameter as missing
        return None
    if _has_decimal_comma(pair.value.value, walk):
        walk.whole = False  # the plan would report the rest of the number as an unknown parameter
        return None
    return {
        name: Setting(_entries(name, inner, walk), inner.where)
        for name, inner in pair.value.value.items()
        if walk.is_parameter(name, inner.where)
    }


def _kind(definition: str) -> Kind:
    return Kind(_parameters, {"$ref": f"#/$defs/{definition}"}, "[parameters](#parameters)")


PARAMETERS = _kind("parameters")
MODEL_PARAMETERS = _kind("model_parameters")
"""Parameters of one model, without those that only the whole merge can have."""
