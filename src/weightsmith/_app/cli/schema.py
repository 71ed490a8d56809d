"""`weightsmith schema`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from weightsmith._app.cli.failures import failures
from weightsmith._base.text import show_json, warn


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
