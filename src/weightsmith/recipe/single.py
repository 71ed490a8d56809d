"""Values that hold no mappings: texts, dtypes, layer ranges, scalars. Each gives the value, or None and a problem."""

from __future__ import annotations

import math

from weightsmith.errors import ParameterError, UnknownName, Unsupported, nearest
from weightsmith.recipe.grammar import Key
from weightsmith.recipe.misuse import Misuse
from weightsmith.recipe.nodes import Node, Pair, Scalar, describe, float_of, short
from weightsmith.recipe.report import Report
from weightsmith.recipe.schedules import DECAYS
from weightsmith.recipe.values import numeric
from weightsmith.tensors import BY_TORCH_NAME, DType

DTYPE_NAMES = ("bfloat16", "float16", "float32", "float64")

_DTYPE_SYNONYMS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "f16": "float16"} | {
    name: "float32" for name in ("fp32", "f32", "float", "single")
}


def read_text(pair: Pair, key: Key, report: Report) -> str | None:
    """A text that is not empty (a filter may be: it fits every name)."""
    value = pair.value.value
    if isinstance(value, str) and (value or key.name == "filter"):
        return value
    fix = "Put it in quotes." if isinstance(value, int | float) else ""
    what = "an empty one" if value == "" else describe(pair.value)
    report.problem(f"{key.name!r} takes a text, not {what}", pair.value.where, fix)
    return None


def read_dtype(pair: Pair, key: Key, report: Report) -> DType | None:
    """A dtype that weights can be merged to, by torch's name with or without `torch.`."""
    value = pair.value.value
    where = pair.value.where
    choices = f"Write one of {', '.join(DTYPE_NAMES)}."
    if not isinstance(value, str):
        report.problem(f"{key.name!r} takes the name of a dtype, not {describe(pair.value)}", where, choices)
        return None
    name = value.removeprefix("torch.")
    if name in DTYPE_NAMES:
        return BY_TORCH_NAME[name]
    if name == "auto":
        fix = "Remove the line: without it the dtype of the inputs is kept."
        report.problem(f"{key.name}: auto is not a dtype", where, fix, UnknownName)
    elif name in BY_TORCH_NAME and not BY_TORCH_NAME[name].floating:
        what = f"{key.name}: {name} would round every weight to a whole number"
        report.problem(what, where, f"{choices} Integer tensors keep their own dtype anyway.", UnknownName)
    elif name in BY_TORCH_NAME or name.startswith("float8"):
        what = f"{key.name}: {name} is not supported: 8-bit floats need scales that a plain merge does not make"
        report.problem(what, where, choices, Unsupported)
    else:
        synonym = _DTYPE_SYNONYMS.get(name)
        hint = f" (did you mean {synonym!r}?)" if synonym else nearest(name, DTYPE_NAMES)
        report.problem(f"unknown dtype {short(value)!r}{hint}", where, choices, UnknownName)
    return None


def read_layer_range(pair: Pair, key: Key, report: Report) -> tuple[int, int] | None:
    """`[first, end]` with 0 <= first < end; whether the model has as many layers is for the plan to say."""
    value, where = pair.value.value, pair.value.where
    fix = "Write [first, end]: [0, 8] is the first eight layers, 0 to 7."
    numbers = [item.value for item in value] if isinstance(value, tuple) else []
    pair_of_ints = len(numbers) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
    if not pair_of_ints:
        shown = describe(pair.value)
        if numbers and len(numbers) < 5:
            shown = f"[{', '.join(describe(n).removeprefix('the ') for n in numbers)}]"
        report.problem(f"'layer_range' takes two whole numbers, not {shown}", where, fix)
        return None
    first, end = numbers
    assert isinstance(first, int)
    assert isinstance(end, int)
    if max(abs(first), abs(end)) > 1_000_000:
        report.problem("'layer_range' reaches beyond layer 1,000,000", where, fix)
    elif first < 0 or end < 0:
        what = f"layer_range [{first}, {end}]: negative numbers do not count from the end"
        report.problem(what, where, "Write the number of layers in full: [0, 32] for all layers of a model of 32.")
    elif end <= first:
        reason = "holds no layers, because the end is not included" if end == first else "ends before it starts"
        report.problem(f"layer_range [{first}, {end}] {reason}", where, fix)
    else:
        return first, end
    return None


def read_value(pair: Pair, key: Key, report: Report) -> Scalar | tuple[Scalar, ...] | None:
    """A finite scalar, or a list of them: a gradient."""
    node = pair.value
    if not isinstance(node.value, tuple):
        return _scalar(node, repr(key.name), report)
    values = [_scalar(item, f"an entry of {key.name!r}", report) for item in node.value]
    kept = tuple(v for v in values if v is not None)
    if len(kept) < len(values):
        return None
    texts = [v for v in kept if isinstance(v, str)]
    if texts and not any(isinstance(v, bool) for v in kept) and all(numeric(v) is not None for v in kept):
        # mergekit 0.1.5 steps through such a list, 0.1.4 interpolated it: no reader can tell which was meant.
        what = f"the list of {key.name!r} holds {texts[0]!r} as text: the list makes steps instead of interpolating"
        number = repr(float(texts[0]))
        number = number if "." in number else number.replace("e", ".0e")  # YAML 1.1 reads 1e-05 as text
        report.misused(Misuse(what, f"Write the number {number}, without quotes.", ParameterError), node.where)
    return kept


def read_share(pair: Pair, key: Key, report: Report) -> float | None:
    """A number from 0 to below 1."""
    value = _number(pair)
    if value is not None and 0 <= value < 1:
        return float(value)
    what = f"{key.name!r} takes a number from 0 to below 1, not {describe(pair.value)}"
    report.problem(what, pair.value.where, "0.9 keeps nine tenths of the average at each step.", ParameterError)
    return None


def read_count(pair: Pair, key: Key, report: Report) -> int | None:
    """A whole number from 1 on."""
    value = _number(pair)
    if value is not None and 1 <= value <= (key.maximum or math.inf) and value == int(value):
        return int(value)
    bounds = f"from 1 to {key.maximum:g}" if key.maximum else "from 1 on"
    what = f"{key.name!r} takes a whole number {bounds}, not {describe(pair.value)}"
    report.problem(what, pair.value.where, key.doc, ParameterError)
    return None


def read_decay(pair: Pair, key: Key, report: Report) -> str | None:
    """The name of a learning rate curve."""
    value = pair.value.value
    if isinstance(value, str) and value in DECAYS:
        return value
    hint = nearest(value, list(DECAYS)) if isinstance(value, str) else ""
    what = f"{key.name!r} takes a learning rate curve, not {describe(pair.value)}{hint}"
    report.problem(what, pair.value.where, f"Write one of {', '.join(DECAYS)}.", ParameterError)
    return None


def _number(pair: Pair) -> int | float | None:
    value = pair.value.value
    return numeric(value) if isinstance(value, bool | int | float | str) else None


def _scalar(node: Node, name: str, report: Report) -> Scalar | None:
    value = node.value
    if value is None or isinstance(value, dict | tuple):
        what = f"{name} takes a number, true, false or a text, not {describe(node)}"
        report.problem(what, node.where, error=ParameterError)
        return None
    if isinstance(value, int | float) and not math.isfinite(float_of(value)):
        report.problem(
            f"{name} is {describe(value).removeprefix('the number ')}; a value must be finite",
            node.where,
            error=ParameterError,
        )
        return None
    return value


def read_choice(pair: Pair, key: Key, report: Report) -> str | None:
    """One of the key's choices."""
    value = pair.value.value
    if isinstance(value, str) and value in key.choices:
        return value
    hint = nearest(value, key.choices) if isinstance(value, str) else ""
    fix = f"Write one of {', '.join(key.choices)}."
    report.problem(f"{key.name!r} is {describe(pair.value)}{hint}", pair.value.where, fix, UnknownName)
    return None


def read_texts(pair: Pair, key: Key, report: Report) -> tuple[str, ...] | None:
    """A list of texts that are not empty; one text is a list of one."""
    value = pair.value.value
    items = value if isinstance(value, tuple) else (pair.value,)
    for item in items:
        if not isinstance(item.value, str) or not item.value:
            what = "an empty text" if item.value == "" else describe(item)
            report.problem(f"{key.name!r} takes a list of texts, not {what}", item.where, 'Write - "text", in quotes.')
            return None
    return tuple(str(item.value) for item in items)


def read_number(pair: Pair, key: Key, report: Report) -> float | None:
    """A finite number within the key's bounds."""
    value = _number(pair)
    low = -math.inf if key.minimum is None else key.minimum
    high = math.inf if key.maximum is None else key.maximum
    if value is not None and math.isfinite(float_of(value)) and low <= value <= high:
        return float(value)
    bounds = f" from {low:g}{f' to {high:g}' if high < math.inf else ' on'}" if low > -math.inf else ""
    what = f"{key.name!r} takes a number{bounds}, not {describe(pair.value)}"
    report.problem(what, pair.value.where, error=ParameterError)
    return None
