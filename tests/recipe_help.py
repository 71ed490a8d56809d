"""Recipes of a merge from YAML texts, with the name of a file."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from weightsmith._base.errors import WeightsmithError
from weightsmith._planning.recipe import Recipe, WrittenRecipe
from weightsmith._planning.recipe.load import _build
from weightsmith._planning.recipe.yaml import read_yaml


def parse(
    text: str, filename: str, *, lenient: bool = False, parameter_names: Collection[str] = ()
) -> tuple[Recipe | None, list[WeightsmithError]]:
    """The recipe, None if its skeleton is broken, and all problems in the order of the text. filename: for positions."""
    written = WrittenRecipe(read_yaml(text, filename, lenient=lenient), text, filename, (filename, text))
    loaded = _build(written, "merge", lenient, parameter_names)
    return cast("Recipe | None", loaded.recipe), list(loaded.problems)
