"""How a model is named: `path_or_hub_id[@revision][+adapter[@revision]]`, or a mapping; how a text is; and these kinds."""

from __future__ import annotations

from collections.abc import Callable

from weightsmith._base.errors import SyntaxProblem, WeightsmithError
from weightsmith._planning.recipe.kinds import FLAG, TEXT, UNUSED, Key, Kind, Level, Walk, choice, count
from weightsmith._planning.recipe.records import ModelRef, Section, TextRef, Tokenizer, TokenRule
from weightsmith._planning.recipe.yaml import Pair, short

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


def _kind(parse: Callable[[str, str], ModelRef | WeightsmithError], pattern: str, level: Level, words: str) -> Kind:
    """A model, as a text that `parse` reads and `pattern` fits, or as a mapping of a level."""

    def read(pair: Pair, key: Key, walk: Walk) -> ModelRef | None:
        value, where = pair.value.value, pair.value.where
        if isinstance(value, dict):
            reference: ModelRef | None = walk.mapping(pair.value, level)
            return reference
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

MODEL_PATH = _kind(parse_path, r"^[^@]+(@[^@]+)?$", PATH, "text, or a [path](#path)")


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

MODEL = _kind(parse_reference, r"^[^+@]+(@[^+@]+)?([+][^+@]+(@[^+@]+)?)?$", REFERENCE, "a [model](#models)")

# ---- texts


def _text(pair: Pair, key: Key, walk: Walk) -> TextRef | None:
    if isinstance(pair.value.value, dict):
        reference: TextRef | None = walk.mapping(pair.value, TEXT_FILE)
        return reference
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
        Key("file", TEXT, "A .txt, .jsonl or .parquet file, or `built-in`.", required=True),
        Key("rows", count(), "Rows of tokens that are read; by default as many as the text has, at most 128."),
        Key("tokens", count(), "Tokens of a row; 512 by default."),
    ),
    make=_text_file,
)

_WORDS = "a path, `built-in`, or a [text_file](#text_file)"
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
