"""The kinds of single values: texts, dtypes, layer ranges, numbers, flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from weightsmith._base.errors import ParameterError, UnknownName, Unsupported, WeightsmithError, nearest
from weightsmith._base.tensors import BY_TORCH_NAME, DTYPE_NAMES, DType
from weightsmith._planning.recipe.kinds import Key, Kind, Schema, Walk
from weightsmith._planning.recipe.nodes import Pair, describe, short
from weightsmith._planning.recipe.values import DECAYS, numeric

_DTYPE_SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "f16": "float16"} | {
    name: "float32" for name in ("fp32", "f32", "float", "single")
}

# ---- texts


def _text(pair: Pair, key: Key, walk: Walk, *, empty: bool = False) -> str | None:
    value = pair.value.value
    if isinstance(value, str) and (value or empty):
        return value
    fix = "Put it in quotes." if isinstance(value, int | float) else ""
    what = "an empty one" if value == "" else describe(pair.value)
    walk.problem(f"{key.name!r} takes a text, not {what}", pair.value.where, fix)
    return None


TEXT = Kind(_text, {"type": "string", "minLength": 1}, "text")
FILTER = Kind(partial(_text, empty=True), {"type": "string"}, "text")  # an empty one is part of every name
METHOD_NAME = Kind(_text, {"$ref": "#/$defs/names_of_methods"}, "text")


def _texts(pair: Pair, key: Key, walk: Walk) -> tuple[str, ...] | None:
    value = pair.value.value
    items = value if isinstance(value, tuple) else (pair.value,)
    for item in items:
        if not isinstance(item.value, str):
            walk.wrong(item, key, "a list of texts", 'Write - "text", in quotes.')
            return None
    return tuple(str(item.value) for item in items)


_ANY_TEXT = {"type": "string"}
TEXTS = Kind(_texts, {"anyOf": [_ANY_TEXT, {"type": "array", "items": _ANY_TEXT}]}, "a text, or a list of texts")


def choice(names: Sequence[str], what: str = "", error: type[WeightsmithError] = UnknownName) -> Kind:
    """One of these names; `what` they are, for the message."""

    def read(pair: Pair, key: Key, walk: Walk) -> str | None:
        value = pair.value.value
        if isinstance(value, str) and value in names:
            return value
        hint = nearest(value, names) if isinstance(value, str) else ""
        shown = f"takes {what}, not" if what else "is"
        fix = f"Write one of {', '.join(names)}."
        walk.problem(f"{key.name!r} {shown} {describe(pair.value)}{hint}", pair.value.where, fix, error)
        return None

    return Kind(read, {"enum": list(names)}, ", ".join(f"`{name}`" for name in names))


DECAY = choice(tuple(DECAYS), "a learning rate curve", ParameterError)


def _dtype(pair: Pair, key: Key, walk: Walk) -> DType | None:
    """A dtype that weights can be merged to, by torch's name with or without `torch.`."""
    value = pair.value.value
    where = pair.value.where
    choices = f"Write one of {', '.join(DTYPE_NAMES)}."
    if not isinstance(value, str):
        walk.wrong(pair.value, key, "the name of a dtype", choices)
        return None
    name = value.removeprefix("torch.")
    if name in DTYPE_NAMES:
        return BY_TORCH_NAME[name]
    if name == "auto":
        fix = "Remove the line: the default is the dtype of the inputs."
        walk.problem(f"{key.name}: auto is not a dtype", where, fix, UnknownName)
    elif name in BY_TORCH_NAME and not BY_TORCH_NAME[name].floating:
        what = f"{key.name}: {name} would round every weight to a whole number"
        walk.problem(what, where, f"{choices} Integer tensors keep their own dtype anyway.", UnknownName)
    elif name in BY_TORCH_NAME or name.startswith("float8"):
        what = f"{key.name}: {name} is not supported: 8-bit floats need scales that a plain merge does not make"
        walk.problem(what, where, choices, Unsupported)
    else:
        synonym = _DTYPE_SYNONYMS.get(name)
        hint = f" (did you mean {synonym!r}?)" if synonym else nearest(name, DTYPE_NAMES)
        walk.problem(f"unknown dtype {short(value)!r}{hint}", where, choices, UnknownName)
    return None


DTYPE = Kind(_dtype, {"enum": [name for dtype in DTYPE_NAMES for name in (dtype, f"torch.{dtype}")]}, "a [dtype](#dtypes)")

# ---- numbers


NUMERAL: Schema = {"type": "string", "pattern": r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$"}
"""A number that YAML 1.1 reads as text, like 1e-5."""


def _number(pair: Pair) -> int | float | None:
    value = pair.value.value
    return numeric(value) if isinstance(value, bool | int | float | str) else None


def number(minimum: float = -math.inf, maximum: float = math.inf) -> Kind:
    """A finite number within these bounds, both inclusive."""
    bounds = f" from {minimum:g}{f' to {maximum:g}' if maximum < math.inf else ' on'}" if minimum > -math.inf else ""

    def read(pair: Pair, key: Key, walk: Walk) -> float | None:
        value = _number(pair)
        if value is not None and minimum <= value <= maximum:
            return float(value)
        walk.wrong(pair.value, key, f"a number{bounds}", f"Write a number{bounds}.", ParameterError)
        return None

    finite = {name: bound for name, bound in (("minimum", minimum), ("maximum", maximum)) if math.isfinite(bound)}
    return Kind(read, {"anyOf": [{"type": "number", **finite}, NUMERAL]}, f"a number{bounds}")


def count(maximum: float = math.inf) -> Kind:
    """A whole number from 1 to `maximum`. The fix of a wrong one is the key's sentence."""
    bounds = f"from 1 to {maximum:g}" if maximum < math.inf else "from 1 on"

    def read(pair: Pair, key: Key, walk: Walk) -> int | None:
        value = _number(pair)
        if value is not None and 1 <= value <= maximum and value == int(value):
            return int(value)
        walk.wrong(pair.value, key, f"a whole number {bounds}", key.doc, ParameterError)
        return None

    schema = {"type": "integer", "minimum": 1} | ({"maximum": maximum} if maximum < math.inf else {})
    return Kind(read, schema, f"a whole number {bounds}")


def _share(pair: Pair, key: Key, walk: Walk) -> float | None:
    value = _number(pair)
    if value is not None and 0 <= value < 1:
        return float(value)
    walk.wrong(
        pair.value, key, "a number from 0 to below 1", "0.9 keeps nine tenths of the average at each step.", ParameterError
    )
    return None


_BELOW_1 = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
SHARE = Kind(_share, {"anyOf": [_BELOW_1, NUMERAL]}, "a number from 0 to below 1")


def _flag(pair: Pair, key: Key, walk: Walk) -> bool | None:
    if isinstance(pair.value.value, bool):
        return pair.value.value
    walk.wrong(pair.value, key, "true or false", "Write true or false.")
    return None


FLAG = Kind(_flag, {"type": "boolean"}, "`true`, `false`")


def _layer_range(pair: Pair, key: Key, walk: Walk) -> tuple[int, int] | None:
    """`[first, end]` with 0 <= first < end; the planner checks it against the model."""
    value, where = pair.value.value, pair.value.where
    fix = "Write [first, end]: [0, 8] is the first eight layers, 0 to 7."
    numbers = [item.value for item in value] if isinstance(value, tuple) else []
    whole = [n for n in numbers if isinstance(n, int) and not isinstance(n, bool)]
    if len(numbers) != 2 or len(whole) != 2:
        shown = describe(pair.value)
        if isinstance(value, tuple) and 0 < len(value) < 5:
            shown = f"[{', '.join(describe(n).removeprefix('the ') for n in value)}]"
        walk.problem(f"'layer_range' takes two whole numbers, not {shown}", where, fix)
        return None
    first, end = whole
    if max(abs(first), abs(end)) > 1_000_000:
        walk.problem("'layer_range' reaches beyond layer 1,000,000", where, fix)
    elif first < 0 or end < 0:
        what = f"layer_range [{first}, {end}]: negative numbers do not count from the end"
        walk.problem(what, where, "Write the number of layers in full: [0, 32] for all layers of a model of 32.")
    elif end <= first:
        reason = "holds no layers, because the end is not included" if end == first else "ends before it starts"
        walk.problem(f"layer_range [{first}, {end}] {reason}", where, fix)
    else:
        return first, end
    return None


_BOUND = {"type": "integer", "minimum": 0}
LAYER_RANGE = Kind(_layer_range, {"type": "array", "items": _BOUND, "minItems": 2, "maxItems": 2}, "`[first, end]`")
