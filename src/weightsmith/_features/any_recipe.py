"""The plan of a recipe whose kind is not known: a merge of models or of adapters, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsmith._base.errors import WeightsmithError
from weightsmith._base.options import find_option, named, option_error
from weightsmith._features.quantisation import quantised
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner import Assembled, Prepared
from weightsmith._planning.planner.build import assemble_recipe, assemble_source
from weightsmith._planning.planner.inputs import is_adapter
from weightsmith._planning.recipe import Recipe, Source, Surgery, Upcycling


def prepare_any(recipe: Source, options: RecipeOptions, settings: QuantizeSettings, *, check: bool = False) -> Prepared:
    """The plan and open checkpoints of a recipe, of `merge` or `moe` depending on its keys; see `plan`.

    check  ask transformers now whether it could load the output
    """

    def make(loaded: Recipe | Upcycling | Surgery, *more: Any, **places: Any) -> Assembled:
        if isinstance(loaded, Recipe):
            return _assemble_models(loaded, *more, **places)
        from weightsmith._features.mixture.build import assemble_mixture

        return assemble_mixture(loaded, *more, **places)

    return quantised(lambda: assemble_source(recipe, None, options, make), options.quantize, settings).finish(check=check)


def assemble_merge(source: Source, options: RecipeOptions) -> Assembled:
    """The draft of a recipe of `merge`, of models or of adapters. Raises PlanError with all problems."""
    return assemble_source(source, "merge", options, _assemble_models)


def _assemble_models(
    recipe: Recipe, options: RecipeOptions, problems: Sequence[WeightsmithError] = (), **places: Any
) -> Assembled:
    """`planner.assemble_recipe`, also for a recipe whose models, but for the base, are local folders with adapters in them."""
    if recipe.models and all(is_adapter(each.model) for each in recipe.models):
        from weightsmith._features.adapters.merge import assemble_adapters

        return assemble_adapters(recipe, options, problems, **places)
    for name in ("adapter_rank", "adapter_space"):
        if getattr(options, name) != find_option(name).default:
            what = "only for merging adapters, and the models of this recipe are not adapters"
            problems = [*problems, option_error(name, what, f"leave out {named(name)}")]
    return assemble_recipe(recipe, options, problems, **places)
