"""The keys of a recipe about the tokenizer: `tokenizer_source`, `tokenizer` and what is inside, `chat_template`."""

from __future__ import annotations

from weightsmith._planning.recipe.kinds import Key, Kind, Level, Walk
from weightsmith._planning.recipe.nodes import Pair, short
from weightsmith._planning.recipe.records import ModelRef, Section, Tokenizer, TokenRule
from weightsmith._planning.recipe.references import MODEL
from weightsmith._planning.recipe.single import FLAG, TEXT, choice, count

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
    reference: ModelRef | None = MODEL.read(pair, key, walk)
    return reference


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
        reference: ModelRef | None = MODEL.read(pair, key, walk)
        return reference
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
