"""`weightsmith methods`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from weightsmith.cli.failures import failures
from weightsmith.cli.text import heading, result, show_table, warn

if TYPE_CHECKING:
    from weightsmith.methods.base import Method, Parameter

_BASE = {
    "required": "base_model is needed, and takes no parameters of its own",
    "optional": "base_model may be given",
    "input": "a base_model is an input like the others",
}


def methods(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One method, in full.", show_default=False)] = "",
) -> None:
    """List the merge methods, or show one.

    Those of installed packages are in the list. One method is shown with its parameters and their defaults, its formula, its
    source, and an example.
    """
    with failures():
        from weightsmith.methods import all_methods, get, installed_methods

        if name:
            _show(replace(get(name), name=name))
            return
        installed, broken = installed_methods()
        found = (*all_methods(), *installed)
        rows = [(m.name, m.title, _models(m), m.base, ", ".join(p.name for p in m.parameters)) for m in found]
        show_table(("method", "", "models", "base", "parameters"), rows)
        for error in broken:
            warn(error.finding)


def _models(method: Method) -> str:
    low, high = method.min_models, method.max_models
    return f"{low}" if low == high else f"{low} to {high}" if high is not None else f"{low} or more"


def _show(method: Method) -> None:
    result(f"{heading(method.name)}: {method.title}")
    result()
    result(method.summary.strip())
    result()
    models = f"{_models(method)}{'' if method.base == 'input' else ' beside the base'}"
    for label, text in (
        ("formula", method.formula),
        ("use", " ".join(method.use.split())),
        ("passes", " ".join(method.passes.split())),
        ("source", method.source),
        ("models", f"{models}; {_BASE[method.base]}"),
    ):
        if text:
            result(f"{heading(f'{label:<8}')} {text}")
    if method.parameters:
        result()
        show_table(
            ("parameter", "value", "default", "given for", "what it does"),
            [(p.name, _values(p), _default(p), _SCOPES[p.scope], _doc(p)) for p in method.parameters],
        )
    if method.example:
        result()
        result(heading("example"))
        result(method.example.rstrip())


_SCOPES = {"model": "each model", "tensor": "the merge"}


def _values(parameter: Parameter) -> str:
    if parameter.choices:
        return " | ".join(parameter.choices)
    if parameter.kind == "bool":
        return "true | false"
    low, high = parameter.minimum, parameter.maximum
    bounds = f" {low:g} to {high:g}" if low is not None and high is not None else ""
    bounds = bounds or (f" >= {low:g}" if low is not None else f" <= {high:g}" if high is not None else "")
    return {"float": "number", "int": "whole number", "str": "text"}[parameter.kind] + bounds


def _default(parameter: Parameter) -> str:
    if parameter.default is None:
        return "required" if parameter.required else "none"
    return str(parameter.default).lower() if isinstance(parameter.default, bool) else str(parameter.default)


def _doc(parameter: Parameter) -> str:
    return f"{parameter.doc} No effect: {parameter.ignored}." if parameter.ignored else parameter.doc
