"""`weightsmith methods`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.failures import failures
from weightsmith._base.errors import printable
from weightsmith._base.text import columns, heading, result, say, section, show_fact, show_json, show_table, warn, wrapped

if TYPE_CHECKING:
    from weightsmith._methods.base import Method


def method_names(incomplete: str) -> list[str]:
    """Methods, for shell completion."""
    from weightsmith._methods import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


def methods(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Method to describe.", show_default=False, autocompletion=method_names),
    ] = "",
    as_json: options.Json = False,
) -> None:
    """List the merge methods by family, or describe one.

    The list includes methods of installed packages. A description has parameters with defaults, formula, source and an
    example.

    Examples:
        weightsmith methods
        weightsmith methods ties
    """
    with failures(as_json=as_json):
        from weightsmith._methods import all_methods, get, installed_methods
        from weightsmith._methods.base import FAMILIES

        if as_json:
            shown = (replace(get(name), name=name),) if name else (*all_methods(), *installed_methods()[0])
            data = [_to_json(method) for method in shown]
            show_json(data[0] if name else data)
            return

        if name:
            _show(replace(get(name), name=name))
            return
        installed, broken = installed_methods()
        listed = (*all_methods(), *installed)
        longest = max(len(method.name) for method in listed)
        for family, words in FAMILIES.items():
            show_table(("", words), [(m.name.ljust(longest), m.title) for m in listed if m.family == family])
            result()
        say("To describe a method: weightsmith methods NAME")
        for error in broken:
            warn(error.finding)


def _to_json(method: Method) -> dict[str, Any]:
    from weightsmith._methods.describe import doc, models

    return {
        "name": method.name,
        "title": method.title,
        "family": method.family,
        "models": models(method),
        "base": method.base,
        "formula": method.formula,
        "source": method.source,
        "parameters": [
            {
                "name": p.name,
                "kind": p.kind,
                "given_for": p.scope,
                "default": p.default,
                "required": p.required,
                "minimum": p.minimum,
                "maximum": p.maximum,
                "choices": list(p.choices),
                "doc": doc(p),
            }
            for p in method.parameters
        ],
    }


def _show(method: Method) -> None:
    from weightsmith._methods.base import FAMILIES
    from weightsmith._methods.describe import describe_method

    # A plug-in may have written it.
    result(f"{heading(printable(method.name))}: {printable(method.title)}")
    result()
    say(_lines(method.summary.strip()) if columns(sys.stdout) is None else printable(" ".join(method.summary.split())))
    result()
    described = describe_method(method)
    for label, text in (
        ("family", FAMILIES[method.family]),
        ("formula", method.formula),
        ("use", " ".join(method.use.split())),
        ("passes", " ".join(method.passes.split())),
        ("source", method.source),
        ("models", described.inputs),
    ):
        if text:
            show_fact(label, _lines(text), 8)
    if method.parameters:
        section("parameters")
        for parameter, p in zip(method.parameters, described.parameters, strict=True):
            facts = f"{p.values}; {'' if parameter.required else 'default '}{p.default}; for {p.scope}"
            name = printable(p.name)
            lines = wrapped(f"{name}: {printable(facts)}", columns(sys.stdout))
            result(heading(name) + lines[len(name) :])
            result(wrapped(f"    {printable(p.doc)}", columns(sys.stdout), ""))
    if method.example:
        section("example")
        result(_lines(method.example.rstrip()))


def _lines(text: str) -> str:
    """Text that has lines, each of them printable."""
    return "\n".join(map(printable, text.split("\n")))


# ---- weightsmith schema


def schema(
    command: Annotated[
        Literal["recipe", "moe"],
        typer.Argument(metavar="recipe|moe", help="Recipes of `weightsmith merge`, or of `weightsmith moe`."),
    ] = "recipe",
    moe: Annotated[bool, typer.Option("--moe", help="The same as `weightsmith schema moe`.")] = False,
) -> None:
    """Print the JSON Schema of recipes.

    Editors complete and check recipes with it: save it to a file, and begin a recipe with the comment
    `# yaml-language-server: $schema=FILE`. It includes the methods of installed packages.

    Examples:
        weightsmith schema > recipe.schema.json
        weightsmith schema moe > moe.schema.json
    """
    with failures():
        from weightsmith._methods import all_methods, installed_methods
        from weightsmith._planning.recipe.schema import moe_schema
        from weightsmith._planning.recipe.schema import schema as merge_schema

        installed, broken = installed_methods()
        for error in broken:
            warn(error.finding)
        make = moe_schema if moe or command == "moe" else merge_schema
        show_json(make((*all_methods(), *installed)), indent=2)
