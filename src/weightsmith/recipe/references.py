"""How a model is named in one string: `path_or_hub_id[@revision][+adapter[@revision]]`."""

from __future__ import annotations

from weightsmith.errors import SyntaxProblem, WeightsmithError
from weightsmith.recipe.nodes import short
from weightsmith.recipe.records import ModelRef

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
        parts = [parse_path(part, where) for part in text.split("+")]
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
        missing = "revision after '@'" if path.strip() else "path or hub id"
        what = f"cannot read the model {short(text)!r}: no {missing}"
        return SyntaxProblem(what, where=where, fix="Write path_or_hub_id or path_or_hub_id@revision.")
    return ModelRef(path, revision, text, where)
