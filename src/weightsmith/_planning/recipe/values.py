"""Kinds of larger values: models, texts, tokenizers, and the parameters of methods.

A model is written `path_or_hub_id[@revision][+adapter[@revision]]`, or as a mapping. A parameter is a value, a gradient, a
schedule, or a list of these with filters.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any, cast

from weightsmith._base.errors import ParameterError, SyntaxProblem, UnknownName, WeightsmithError, nearest
from weightsmith._planning.recipe.blocks import BASE, TABLES, BlockTable, numbers_in
from weightsmith._planning.recipe.kinds import (
    DECAY,
    FILTER,
    FLAG,
    SHARE,
    TEXT,
    UNUSED,
    Key,
    Kind,
    Level,
    Walk,
    choice,
    count,
    list_schema,
)
from weightsmith._planning.recipe.records import (
    NESTED,
    Entry,
    ModelRef,
    Rule,
    Schedule,
    Section,
    Setting,
    TextRef,
    Tokenizer,
    TokenRule,
    numeric,
)
from weightsmith._planning.recipe.yaml import Node, Pair, Scalar, describe, float_of, short

_MAPPING_FORM = "A folder whose name holds '+' or '@' is written model: {model: {path: ...}}."


def parse_reference(text: str, where: str) -> ModelRef | WeightsmithError:
    """The model that a string names, or the problem with it.

    >>> parse_reference("org/name@v2", "r.yml:1:1").revision
    'v2'
    >>> str(parse_reference("org/name+org/adapter", "r.yml:1:1").lora)
    'org/adapter'
    """
    if "+" in text:
        if text.count("+") > 1:
            what = f"cannot read the model {short(text)!r}: more than one '+'"
            return SyntaxProblem(what, where=where, fix=_MAPPING_FORM)
        written = text.split("+")
        if not all(part.strip() for part in written):
            missing = "adapter after" if written[0].strip() else "model before"
            what = f"cannot read the model {short(text)!r}: no {missing} '+'"
            return SyntaxProblem(what, where=where, fix="Write base_path_or_hub_id+adapter_path_or_hub_id.")
        parts = [parse_path(part, where) for part in written]
        base, lora = parts
        if isinstance(base, ModelRef) and isinstance(lora, ModelRef):
            return base.with_lora(lora)
        return next(part for part in parts if not isinstance(part, ModelRef))
    return parse_path(text, where)


def parse_path(text: str, where: str) -> ModelRef | SyntaxProblem:
    """The model that `path[@revision]` names, or the problem with it."""
    if text.count("@") > 1:
        what = f"cannot read the model {short(text)!r}: more than one '@'"
        return SyntaxProblem(what, where=where, fix=_MAPPING_FORM)
    path, at, revision = text.partition("@")
    if not path.strip() or (at and not revision.strip()):
        missing = "revision after '@'" if path.strip() else "path or Hub id"
        what = f"cannot read the model {short(text)!r}: no {missing}"
        return SyntaxProblem(what, where=where, fix="Write path_or_hub_id or path_or_hub_id@revision.")
    return ModelRef(path, revision, text, where)


def _model_kind(parse: Callable[[str, str], ModelRef | WeightsmithError], pattern: str, level: Level, words: str) -> Kind:
    """A model, as a text that `parse` reads and `pattern` fits, or as a mapping of a level."""

    def read(pair: Pair, key: Key, walk: Walk) -> ModelRef | None:
        value, where = pair.value.value, pair.value.where
        if isinstance(value, dict):
            return walk.mapping(pair.value, level)
        if isinstance(value, str):
            outcome = parse(value, where)
            if isinstance(outcome, ModelRef):
                return outcome
            walk.problems.append(outcome)
            return None
        fix = "Write path_or_hub_id[@revision]" + ("; put digits in quotes." if isinstance(value, int | float) else ".")
        walk.wrong(pair.value, key, "a model", fix)
        return None

    return Kind(read, {"anyOf": [{"type": "string", "pattern": pattern}, level.schema]}, words, level)


def _path(section: Section) -> ModelRef:
    path, revision = section.values["path"], section.values.get("revision", "")
    return ModelRef(path, revision, f"{path}@{revision}" if revision else path, section.where)


PATH = Level(
    "path",
    "in a model path",
    "A model's place and version.",
    (
        Key("path", TEXT, "Folder, weight file, or Hub id `org/name`.", required=True),
        Key("revision", TEXT, "Branch, tag or commit of a Hub model."),
    ),
    make=_path,
)

MODEL_PATH = _model_kind(parse_path, r"^[^@]+(@[^@]+)?$", PATH, "text, or a [path](#path)")


def _reference(section: Section) -> ModelRef:
    model: ModelRef = section.values["model"]
    return model.with_lora(section.values["lora"]) if "lora" in section.values else model


REFERENCE = Level(
    "reference",
    "in a model reference",
    "A model, written as a mapping: for paths that hold `+` or `@`.",
    (
        Key("model", MODEL_PATH, "`path[@revision]`, or a mapping with `path` and `revision`.", required=True),
        Key("lora", MODEL_PATH, "A LoRA adapter that is applied to the model: `path[@revision]`, or a mapping as for `model`."),
        Key("override_architecture", UNUSED, "Not needed: structure comes from tensor names."),
    ),
    make=_reference,
)

MODEL = _model_kind(parse_reference, r"^[^+@]+(@[^+@]+)?([+][^+@]+(@[^+@]+)?)?$", REFERENCE, "a [model](#models)")

# ---- texts


def _text(pair: Pair, key: Key, walk: Walk) -> TextRef | None:
    if isinstance(pair.value.value, dict):
        return walk.mapping(pair.value, TEXT_FILE)
    path: str | None = TEXT.read(pair, key, walk)
    return None if path is None else TextRef(path, where=pair.value.where)


def _text_file(section: Section) -> TextRef:
    values = section.values
    return TextRef(values["file"], values.get("rows"), values.get("tokens"), section.where)


TEXT_FILE = Level(
    "text_file",
    "in a text",
    "A text that models are measured on, and how much of it.",
    (
        Key(
            "file",
            TEXT,
            "A .txt, .jsonl or .parquet file; `built-in`; or `own`: what the model writes by itself.",
            required=True,
        ),
        Key(
            "rows",
            count(),
            "Rows of tokens that are read; by default as many as the text has, at most 128. With `own`, the number to write, "
            "20 by default.",
        ),
        Key("tokens", count(), "Tokens of a row; 512 by default, 128 for `own`."),
    ),
    make=_text_file,
)

_WORDS = "a path, `built-in`, `own`, or a [text_file](#text_file)"
MEASURED_ON = Kind(_text, {"anyOf": [TEXT.schema, TEXT_FILE.schema]}, _WORDS, TEXT_FILE)


# ---- The keys of a recipe about the tokenizer: `tokenizer_source`, `tokenizer` and what is inside, `chat_template`


WORDS = ("union", "base")


def _source(pair: Pair, key: Key, walk: Walk) -> str | ModelRef | None:
    if pair.value.value in WORDS:
        return str(pair.value.value)
    if isinstance(pair.value.value, str) and pair.value.value.startswith("model:"):
        what = "mergekit's old form 'model:' of a tokenizer source, which its later versions do not read either"
        walk.problem(
            what, pair.value.where, f"Write the model alone: {short(pair.value.value.removeprefix('model:').strip())}."
        )
        return None
    return MODEL.read(pair, key, walk)


SOURCE_OF_TOKENIZER = Kind(
    _source, {"anyOf": [{"enum": list(WORDS)}, MODEL.schema]}, "`union`, `base`, or a [model](#models)", MODEL.of
)


_MAX_ID = 1 << 24


def _id(pair: Pair, key: Key, walk: Walk) -> int | None:
    value = pair.value.value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ID:
        return value
    walk.wrong(pair.value, key, "the id of a token", "Write a number from 0 on.")
    return None


_ID = Kind(_id, {"type": "integer", "minimum": 0, "maximum": _MAX_ID}, "a whole number from 0 on")

ROW = Level(
    "row",
    "in the source of a token",
    "The row of a token: zeros, or that of a token of a model.",
    (
        Key(
            "kind",
            choice(("zero", "model_token")),
            "`zero`: zeros. `model_token`: the row of a token of a model.",
            required=True,
        ),
        Key("model", MODEL, "The model, one of the merge."),
        Key("token", TEXT, "The token of that model, as its tokenizer writes it."),
        Key("token_id", _ID, "Its id instead."),
    ),
)


def _row(pair: Pair, key: Key, walk: Walk) -> Section | ModelRef | None:
    """`{kind: …}`, or a model."""
    value = pair.value.value
    if not isinstance(value, dict) or "kind" not in value:
        return MODEL.read(pair, key, walk)
    section: Section | None = walk.mapping(pair.value, ROW)
    if section is None:
        return None
    token_keys = [name for name in ("token", "token_id") if name in section.values]
    if section.values["kind"] == "zero":
        if token_keys or "model" in section.values:
            walk.problem("a row of zeros has no model and no token", section.where, "Write {kind: zero}.")
            return None
    elif "model" not in section.values or len(token_keys) != 1:
        fix = "Write {kind: model_token, model: ..., token: ...}, or token_id."
        walk.problem("kind 'model_token' needs a model, and one of token and token_id", section.where, fix)
        return None
    return section


_ZERO = {"properties": {"kind": {"const": "zero"}, **dict.fromkeys(("model", "token", "token_id"), False)}}
_ONE_TOKEN = {
    "properties": {"kind": {"const": "model_token"}},
    "required": ["model"],
    "oneOf": [{"required": ["token"]}, {"required": ["token_id"]}],
}
_ROW_SCHEMA = {"anyOf": [{"allOf": [ROW.schema, {"anyOf": [_ZERO, _ONE_TOKEN]}]}, MODEL.schema]}
_ROW = Kind(_row, _ROW_SCHEMA, f"a [model](#models), or a {ROW.words}", ROW)

TOKEN = Level(
    "token",
    "under a token",
    "Where the rows of a token come from.",
    (
        Key("source", _ROW, "Where models that lack this token get its row; it must be one of the merge."),
        Key("force", FLAG, "All models take that row, even those that have the token; false by default."),
    ),
)


def _tokens(pair: Pair, key: Key, walk: Walk) -> tuple[TokenRule, ...] | None:
    value = pair.value.value
    if not isinstance(value, dict):
        fix = "Write each token with its source: tokens: {'<|im_start|>': {source: ...}}."
        walk.wrong(pair.value, key, "a mapping of tokens", fix)
        return None
    rules = []
    for token, inner in value.items():
        section = walk.mapping(inner.value, TOKEN) if inner.value.value is not None else Section({}, inner.where, {})
        if section is None:
            continue
        source, force = section.values.get("source"), section.values.get("force", False)
        if "force" in section.values and source is None:
            walk.problem(
                f"'force' for the token {token!r} needs a source", inner.where, "Add source: the model whose row all take."
            )
        elif not token:
            walk.problem("a token cannot be empty", inner.where)
        elif isinstance(source, Section):
            about = source.values
            rules.append(
                TokenRule(token, inner.where, about.get("model"), about.get("token", about.get("token_id")), True, force)
            )
        else:
            rules.append(TokenRule(token, inner.where, source, None, False, force))
    return tuple(rules)


_ONE = {"allOf": [TOKEN.schema, {"dependentRequired": {"force": ["source"]}}]}
_TOKENS_SCHEMA = {
    "type": "object",
    "propertyNames": {"minLength": 1},
    "additionalProperties": {"anyOf": [_ONE, {"type": "null"}]},
}
TOKENS = Kind(_tokens, _TOKENS_SCHEMA, f"tokens, each with a {TOKEN.words}", TOKEN)


def _tokenizer(section: Section) -> Tokenizer:
    values = section.values
    source = values.get("source", "union")
    return Tokenizer(source, section.at("source"), values.get("tokens", ()), values.get("pad_to_multiple_of", 1))


TOKENIZER = Level(
    "tokenizer",
    "in 'tokenizer'",
    "The tokenizer of the output, and the rows of its tokens.",
    (
        Key("source", SOURCE_OF_TOKENIZER, "Whose tokenizer the output has; `union` by default."),
        Key("tokens", TOKENS, "Tokens whose rows are chosen by hand; a token that the tokenizer lacks is added to it."),
        Key("pad_to_multiple_of", count(1 << 16), "Round the number of rows up to a multiple of this number."),
    ),
    make=_tokenizer,
)

LEVELS = (TOKENIZER, TOKEN, ROW)


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


def _block_values(pair: Pair, key: Key, walk: Walk) -> Node | None:
    """The values, checked; which blocks they are for depends on the table that `blocks` names."""
    node, before = pair.value, len(walk.problems)
    if isinstance(node.value, str) and numbers_in(node.value) is not None:
        return node
    if isinstance(node.value, tuple) and node.value:
        for item in node.value:
            _scalar(item, f"an entry of {key.name!r}", walk)
    elif isinstance(node.value, dict) and node.value:
        for block, inner in node.value.items():
            _scalar(inner.value, f"the block {block!r}", walk)
    else:
        fix = "Write values: {IN00-IN05: 0.2, M00: 0.5}."
        walk.wrong(node, key, "a list of numbers, or block names with numbers", fix, ParameterError)
    return node if len(walk.problems) == before else None


_NUMERALS = r"^\s*NUMBER\s*(,\s*NUMBER\s*)*$".replace("NUMBER", r"[-+]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][-+]?[0-9]+)?")
BLOCK_VALUES = Kind(
    _block_values,
    {
        "anyOf": [
            {"type": "string", "pattern": _NUMERALS},
            list_schema(ANY_SCALAR),
            {"type": "object", "minProperties": 1, "additionalProperties": ANY_SCALAR},
        ]
    },
    "a list of values, its text, or block names, each with a value",
)

BLOCK_WEIGHTS = Level(
    "block_weights",
    "in the values of blocks",
    "Values for the blocks of a diffusion model.",
    (
        Key(
            "blocks",
            choice(tuple(TABLES)),
            "The family of the model, which has the [names](diffusion.md#block-weights).",
            required=True,
        ),
        Key(
            "values",
            BLOCK_VALUES,
            "One value for each block, in order; or names of blocks, or ranges, with values.",
            required=True,
        ),
    ),
)


def _blocks(node: Node, walk: Walk) -> list[Entry]:
    """An entry for each block."""
    section: Section | None = walk.mapping(node, BLOCK_WEIGHTS)
    if section is None or not {"blocks", "values"} <= section.values.keys():
        return []
    table, values = TABLES[section.values["blocks"]], section.values["values"]
    if isinstance(values.value, dict):
        entries = [entry for block, pair in values.value.items() for entry in _named_blocks(block, pair, table, walk)]
    else:
        entries = _listed_blocks(values, table, walk)
    return [*(e for e in entries if e.starts), *(e for e in entries if not e.starts)]  # BASE is for the rest


def _listed_blocks(values: Node, table: BlockTable, walk: Walk) -> list[Entry]:
    """The entries of a list, in the order of the table."""
    items = values.value if isinstance(values.value, tuple) else ()
    listed: list[Any] = (numbers_in(values.value) or []) if isinstance(values.value, str) else [item.value for item in items]
    if table.order and len(listed) == len(table.order):
        return [_block(table, block, value, values.where) for block, value in zip(table.order, listed, strict=True)]
    names = [*table.blocks]
    what = f"models of {table.title} have several numbers of blocks, so a list of {len(listed)} values is ambiguous"
    fix = f"Write names, such as values: {{{names[0]}: 0.2, {names[-1]}: 0.5}}."
    if table.order:
        what = f"{len(listed)} values, and the list of {table.title} has {len(table.order)}"
        first, second, *_, last = table.order
        fix = f"Write them in this order: {first}, {second}, … {last}; or write block names with values."
    walk.problem(what, values.where, fix, ParameterError)
    return []


def _named_blocks(block: str, pair: Pair, table: BlockTable, walk: Walk) -> list[Entry]:
    """The entry of a block, or of a range of blocks: a model need not have all numbers of a range."""
    names, value = table.expand(block), pair.value.value
    if names and all(table.starts(name) is not None for name in names):
        assert isinstance(value, str | int | float)
        starts = [start for name in names for start in table.starts(name) or ()]
        return [Entry(value, block if starts else None, pair.value.where, pair.where if starts else "", tuple(starts))]
    first, second, *_, last = table.blocks
    what = f"{table.title} has no block {block!r}{nearest(block, [*table.blocks, BASE])}"
    walk.problem(what, pair.where, f"Write one of {BASE}, {first}, {second}, … {last}, or a range.", UnknownName)
    return []


def _block(table: BlockTable, block: str, value: Scalar, where: str) -> Entry:
    starts = table.starts(block) or ()
    return Entry(value, block if starts else None, where, where if starts else "", starts)


def _condition(node: Node, walk: Walk) -> Entry | None:
    assert isinstance(node.value, dict)
    if "value" in node.value:
        return walk.mapping(node, CONDITION)
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
        entries = []
        for item in items:
            is_blocks = isinstance(item.value, dict) and "blocks" in item.value
            entries += _blocks(item, walk) if is_blocks else [_condition(item, walk)]
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


def _parameters_kind(definition: str) -> Kind:
    return Kind(_parameters, {"$ref": f"#/$defs/{definition}"}, "[parameters](#parameters)")


PARAMETERS = _parameters_kind("parameters")
MODEL_PARAMETERS = _parameters_kind("model_parameters")
"""Parameters of one model, without those that only the whole merge can have."""
