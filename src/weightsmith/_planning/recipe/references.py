"""How a model is named: `path_or_hub_id[@revision][+adapter[@revision]]`, or a mapping; how a text is; and these kinds."""

from __future__ import annotations

from collections.abc import Callable

from weightsmith._base.errors import SyntaxProblem, WeightsmithError
from weightsmith._planning.recipe.kinds import UNUSED, Key, Kind, Level, Walk
from weightsmith._planning.recipe.nodes import Pair, short
from weightsmith._planning.recipe.records import ModelRef, Section, TextRef
from weightsmith._planning.recipe.single import TEXT, count

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
