"""Recipes of `weightsmith merge`: of models, or of adapters. Nothing else of this room is imported for a merge of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsmith._base.errors import WeightsmithError
from weightsmith._base.options import RecipeOptions, find_option, named, option_error
from weightsmith._features.adapters.opening import is_adapter
from weightsmith._planning.planner.build import assemble_recipe, assemble_source
from weightsmith._planning.planner.prepared import Assembled
from weightsmith._planning.recipe import Recipe, Source


def assemble_merge(source: Source, options: RecipeOptions) -> Assembled:
    """The draft of a recipe of `merge`, of models or of adapters. Raises PlanError with all problems."""
    return assemble_source(source, "merge", options, assemble_models)


def assemble_models(
    recipe: Recipe, options: RecipeOptions, problems: Sequence[WeightsmithError] = (), **places: Any
) -> Assembled:
    """`planner.assemble_recipe`, also for a recipe whose models are adapters."""
    if are_adapters(recipe):
        from weightsmith._features.adapters.merge import assemble_adapters

        return assemble_adapters(recipe, options, problems, **places)
    for name in ("adapter_rank", "adapter_space"):
        if getattr(options, name) != find_option(name).default:
            what = "only for merging adapters, and the models of this recipe are not adapters"
            problems = [*problems, option_error(name, what, f"leave out {named(name)}")]
    return assemble_recipe(recipe, options, problems, **places)


def are_adapters(recipe: Recipe) -> bool:
    """Whether every model of the recipe, but for the base, is a local folder with an adapter in it."""
    return bool(recipe.models) and all(is_adapter(each.model) for each in recipe.models)
