"""The plan of a recipe whose kind is not known: a merge, a merge of adapters, or a mixture of experts."""

from __future__ import annotations

from typing import Any

from weightsmith._base.options import QuantizeSettings, RecipeOptions
from weightsmith._features.adapters.recipes import assemble_models
from weightsmith._features.quantisation import quantised
from weightsmith._planning.planner import Assembled, Prepared
from weightsmith._planning.planner.build import assemble_source
from weightsmith._planning.recipe import Recipe, Source, Surgery, Upcycling


def prepare_any(recipe: Source, options: RecipeOptions, settings: QuantizeSettings, *, check: bool = False) -> Prepared:
    """The plan and open checkpoints of a recipe, of `merge` or `moe` depending on its keys; see `plan`.

    check  ask transformers now whether it could load the output
    """

    def make(loaded: Recipe | Upcycling | Surgery, *more: Any, **places: Any) -> Assembled:
        if isinstance(loaded, Recipe):
            return assemble_models(loaded, *more, **places)
        from weightsmith._features.mixture.build import assemble_mixture

        return assemble_mixture(loaded, *more, **places)

    return quantised(lambda: assemble_source(recipe, None, options, make), options.quantize, settings).finish(check=check)
