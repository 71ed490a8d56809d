"""How a model is named in one string: `path_or_hub_id[@revision][+lora[@revision]]`."""

from __future__ import annotations

from weightsmith.errors import SyntaxProblem, Unsupported, WeightsmithError
from weightsmith.recipe.misuse import REFUSED
from weightsmith.recipe.nodes import short
from weightsmith.recipe.records import ModelRef

_MAPPING_FORM = "A folder whose name holds '+' or '@' is written model: {model: {path: ...}}."


def parse_reference(text: str, where: str) -> ModelRef | WeightsmithError:
    """The model that a string names, or the problem with it.

    >>> parse_reference("org/name@v2", "r.yml:1:1").revision
    'v2'
    """
    if "+" in text:
        if text.count("+") > 1:
            what = f"cannot read the model {short(text)!r}: more than one '+'"
            return SyntaxProblem(what, where=where, fix=_MAPPING_FORM)
        what, fix = REFUSED["lora"]
        base, _, lora = text.partition("+")
        details = (f"model {short(base)}", f"adapter {short(lora)}")
        return Unsupported(what, where=where, details=details, fix=f"{fix} {_MAPPING_FORM}")
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
