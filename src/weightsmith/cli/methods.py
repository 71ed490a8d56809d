"""`weightsmith methods`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from weightsmith.cli.failures import failures
from weightsmith.cli.text import heading, result, show_table, warn

if TYPE_CHECKING:
    from weightsmith.methods.base import Method


def methods(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One method, in full.", show_default=False)] = "",
) -> None:
    """List the merge methods, or show one.

    Those of installed packages are in the list. One method is shown with its parameters and their defaults, its formula, its
    source, and an example.
    """
    with failures():
        from weightsmith.methods import all_methods, get, installed_methods
        from weightsmith.methods.describe import models

        if name:
            _show(replace(get(name), name=name))
            return
        installed, broken = installed_methods()
        found = (*all_methods(), *installed)
        rows = [(m.name, m.title, models(m), m.base, ", ".join(p.name for p in m.parameters)) for m in found]
        show_table(("method", "", "models", "base", "parameters"), rows)
        for error in broken:
            warn(error.finding)


def _show(method: Method) -> None:
    from weightsmith.methods.describe import BASES, SCOPES, default, doc, models, values

    result(f"{heading(method.name)}: {method.title}")
    result()
    result(method.summary.strip())
    result()
    inputs = f"{models(method)}{'' if method.base == 'input' else ' besides the base'}"
    for label, text in (
        ("formula", method.formula),
        ("use", " ".join(method.use.split())),
        ("passes", " ".join(method.passes.split())),
        ("source", method.source),
        ("models", f"{inputs}; {BASES[method.base]}"),
    ):
        if text:
            result(f"{heading(f'{label:<8}')} {text}")
    if method.parameters:
        result()
        show_table(
            ("parameter", "value", "default", "given for", "what it does"),
            [(p.name, values(p), default(p), SCOPES[p.scope], doc(p)) for p in method.parameters],
        )
    if method.example:
        result()
        result(heading("example"))
        result(method.example.rstrip())
