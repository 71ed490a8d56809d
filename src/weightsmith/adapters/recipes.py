"""Recipes of `weightsmith merge`: of models, or of adapters. Nothing else of this room is imported for a merge of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsmith.errors import WeightsmithError
from weightsmith.lora import is_adapter
from weightsmith.options import RecipeOptions, find_option, named, option_error
from weightsmith.planner.build import Prepared, prepare_recipe, prepare_source
from weightsmith.recipe import Recipe, Source


def prepare_merge(source: Source, options: RecipeOptions) -> Prepared:
    """Plan a recipe of `merge`, of models or of adapters. Raises PlanError with all problems."""
    return prepare_source(source, "merge", options, prepare_models)


def prepare_models(
    recipe: Recipe, options: RecipeOptions, problems: Sequence[WeightsmithError] = (), **places: Any
) -> Prepared:
    """`planner.prepare_recipe`, also for a recipe whose models are adapters."""
    if are_adapters(recipe):
        from weightsmith.adapters.merge import prepare_adapters

        return prepare_adapters(recipe, options, problems, **places)
    for name in ("adapter_rank", "adapter_space"):
        if getattr(options, name) != find_option(name).default:
            what = "only for merging adapters, and the models of this recipe are not adapters"
            problems = [*problems, option_error(name, what, f"leave out {named(name)}")]
    return prepare_recipe(recipe, options, problems, **places)


def are_adapters(recipe: Recipe) -> bool:
    """Whether every model of the recipe, but for the base, is a local folder with an adapter in it."""
    return bool(recipe.models) and all(is_adapter(each.model) for each in recipe.models)
