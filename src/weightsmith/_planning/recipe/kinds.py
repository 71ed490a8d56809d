"""The form of the grammar: a kind of value, a key of a mapping, a level of mappings. The kinds that hold mappings.

A `Kind` is everything there is to know of a kind of value, so adding one is one entry in one file: here (single
values) or in `values.py` (models, texts, tokenizers, parameters).

    FLAG = Kind(_flag, {"type": "boolean"}, "`true`, `false`")
    Key("match", FLAG, "Reorder the neurons of each expert to match the group's first; false by default.")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from weightsmith._base.errors import Finding, ParameterError, SyntaxProblem, UnknownName, Unsupported, WeightsmithError, nearest
from weightsmith._base.tensors import BY_TORCH_NAME, DTYPE_NAMES, DType
from weightsmith._planning.recipe.records import DECAYS, Recipe, Section, numeric
from weightsmith._planning.recipe.yaml import Node, Pair, describe, short

Schema = Mapping[str, Any]


class Walk:
    """One reading of a document. What a kind's reader needs of it; `load.Walker` reads the mappings.

    filename  for positions
    lenient   settings that mergekit silently ignores are warnings instead of errors
    problems  errors, in the order found
    findings  warnings, in the order found: an ordered set, because an aliased value is read at each of its uses
    whole     False once the skeleton of the recipe has a hole
    stages    the recipes that are models of others, see `Recipe.stages`
    depth     of the recipes inside recipes that are being read
    """

    def __init__(
        self, filename: str, findings: Iterable[Finding], stages: dict[str, Recipe | None] | None, *, lenient: bool
    ) -> None:
        self.filename = filename
        self.lenient = lenient
        self.problems: list[WeightsmithError] = []
        self.findings = dict.fromkeys(findings)
        self.whole = True
        self.stages: dict[str, Recipe | None] = {} if stages is None else stages
        self.depth = 0

    def problem(
        self,
        what: str,
        where: str,
        fix: str = "",
        error: type[WeightsmithError] = SyntaxProblem,
        details: tuple[str, ...] = (),
    ) -> None:
        """Add an error."""
        self.problems.append(error(what, where=where, details=details, fix=fix))

    def wrong(self, node: Node, key: Key, expected: str, fix: str = "", error: type[WeightsmithError] = SyntaxProblem) -> None:
        """Add the error that a key takes another kind of value."""
        self.problem(f"{key.name!r} takes {expected}, not {describe(node)}", node.where, fix, error)

    def warn(self, what: str, where: str, fix: str = "") -> None:
        """Add a warning."""
        self.findings[Finding(what, where, fix=fix)] = None

    def misused(self, what: str, where: str, fix: str, error: type[WeightsmithError], *, harmless: bool = False) -> bool:
        """Report a setting that mergekit ignores; True if it is an error, False if it is a warning."""
        if harmless or self.lenient:
            self.warn(what, where, fix)
            return False
        self.problem(what, where, fix, error)
        return True

    def mapping(self, node: Node, level: Level) -> Any:
        """Read a mapping of a level; None if it is not a mapping, or a required key is missing or wrong."""
        raise NotImplementedError

    def is_parameter(self, name: str, where: str) -> bool:
        """True if any method has a parameter of this name; reported if not. The planner checks it against the method."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of value.

    read    the value; or None, with the problem and its position reported to the walk
    schema  JSON Schema of what `read` accepts
    words   the same as Markdown, for the reference page
    of      the level of the mappings inside the value
    """

    read: Callable[[Pair, Key, Walk], Any]
    schema: Schema
    words: str
    of: Level | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """One key of a mapping; `doc` is one sentence for messages, editors and the reference page."""

    name: str
    kind: Kind
    doc: str
    required: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One kind of mapping in a recipe.

    name    for the schema's $defs and the headings of the reference page
    place   for messages: "unknown key 'x' <place>"
    one_of  exactly one of these keys must be given
    make    the value of such a mapping; called only when no required key is missing
    """

    name: str
    place: str
    doc: str
    keys: tuple[Key, ...]
    one_of: tuple[str, ...] = ()
    make: Callable[[Section], Any] = lambda section: section

    def key(self, name: str) -> Key | None:
        """The key of this name, or None."""
        return next((key for key in self.keys if key.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the keys, in the order shown to users."""
        return tuple(key.name for key in self.keys)

    @property
    def schema(self) -> Schema:
        """A reference to the level's definition."""
        return {"$ref": f"#/$defs/{self.name}"}

    @property
    def words(self) -> str:
        """A link to the level's heading."""
        return f"[{self.name}](#{self.name})"


def list_schema(items: Schema) -> Schema:
    """A list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1}


def section(level: Level) -> Kind:
    """A mapping of a level."""
    return Kind(lambda pair, key, walk: walk.mapping(pair.value, level), level.schema, level.words, level)


def list_of(level: Level) -> Kind:
    """A list of mappings of a level, not empty. Mappings with problems are left out."""

    def read(pair: Pair, key: Key, walk: Walk) -> tuple[Any, ...] | None:
        entries = pair.value.value
        if not isinstance(entries, tuple):
            fix = f"Write each entry after a dash: - {level.names[0]}: ..."
            walk.wrong(pair.value, key, "a list", fix)
        elif not entries:
            walk.problem(f"{key.name!r} is empty", pair.value.where, f"Write at least one entry: - {level.names[0]}: ...")
        else:
            return tuple(entry for node in entries if (entry := walk.mapping(node, level)) is not None)
        return None

    return Kind(read, list_schema(level.schema), f"a list of {level.words}", level)


NOT_IN_MIXTURES: Mapping[str, tuple[str, str]] = {
    "tokenizer_source": (
        "tokenizer_source is not supported in a recipe of `weightsmith moe`",
        "Remove this line: the base's tokenizer is then copied, as 'base' would ask for.",
    ),
    "tokenizer": (
        "tokenizer is not supported in a recipe of `weightsmith moe`",
        "Remove this block: the base's tokenizer is then copied.",
    ),
    "chat_template": (
        "chat_template is not supported in a recipe of `weightsmith moe`",
        "Remove this line: the base's chat template is then copied.",
    ),
}
"""Keys of a merge that a mixture does not take: the error and the next step."""

NO_EFFECT: Mapping[str, str] = {
    "residual_weight": "residual_weight has no effect: mergekit read it and never used it",
    "override_architecture": "override_architecture is not needed and has no effect: structure comes from tensor names",
}
"""Keys of the kind UNUSED: the warning."""


UNUSED = Kind(lambda pair, key, walk: walk.warn(NO_EFFECT[key.name], pair.where, "Remove it."), {}, "anything; a warning")


# ---- The kinds of single values: texts, dtypes, layer ranges, numbers, flags


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
