"""The plan of any recipe: a merge of models or of adapters, or a mixture of experts; plain, or in a quantised format."""

from __future__ import annotations

import os
from dataclasses import replace

from weightsmith._base.errors import PlanError, Unsupported, WeightsmithError, undoing
from weightsmith._base.options import find_option, named, option_error
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.build import NOTHING, assemble_recipe, in_recipe, read_plan_request
from weightsmith._planning.planner.inputs import is_adapter
from weightsmith._planning.planner.prepared import PlanRequest, Prepared, Written
from weightsmith._planning.recipe import Command, Recipe, Source, copy_of
from weightsmith._plans import Provenance
from weightsmith._version import __version__


def prepare_any(
    source: Source,
    options: RecipeOptions,
    settings: QuantizeSettings,
    *,
    command: Command | None = None,
    check: bool = False,
) -> Prepared:
    """The plan and open checkpoints of a recipe; see `plan`.

    command  `merge` or `moe`; None: its keys decide
    check    ask transformers now whether it could load the output

    Raises PlanError with all problems of the recipe, the models, and the format and its settings.
    """
    return assemble_request(read_plan_request(source, command, options, settings)).finish(check=check)


def assemble_request(request: PlanRequest, written: Written = NOTHING) -> Prepared:
    """The draft of a plan. written: folders with results of other recipes, which it reads instead of computing them."""
    name, settings = request.options.quantize, request.settings
    settings = settings if isinstance(settings, QuantizeSettings) else QuantizeSettings()
    problems: list[WeightsmithError] = []
    if name is not None or settings.changed:
        from weightsmith._features.quantisation.formats import apply_format, problems_of

        problems = problems_of(name, settings)
    with in_recipe(request.source):
        try:
            prepared = _assemble(request, written)
        except PlanError as error:
            if not problems:
                raise
            raise PlanError([*error.problems, *problems]) from error
    with undoing(prepared.close):
        if problems:
            raise PlanError(problems)
        if name is not None:
            apply_format(prepared, name, settings, request.options)
    prepared.request, prepared.source = request, request.source
    return prepared


def prepare_copy(model: str | os.PathLike[str], options: RecipeOptions, settings: QuantizeSettings) -> Prepared:
    """Plan a copy of a model in the format `options.quantize`; None: with plain weights.

    model  as in a recipe: a folder, a hub id, `base+adapter`

    Raises PlanError with all problems.
    """
    request = read_plan_request(copy_of(model), "merge", options, settings)
    if isinstance(request.recipe, Recipe) and (options.quantize or "").startswith("gguf"):
        _check_no_adapter(request.recipe)
    prepared = assemble_request(replace(request, is_copy=True))
    provenance = Provenance("dequantize", f"Dequantised with weightsmith {__version__}.", relation="")
    if options.quantize is not None:
        title = f"Quantised with weightsmith {__version__} as `{options.quantize}`."
        provenance = Provenance("quantize", title, relation="quantized", format=options.quantize)
    prepared.draft.provenance = provenance
    return prepared.finish()


def _check_no_adapter(recipe: Recipe) -> None:
    """Raise PlanError for an adapter alone: llama.cpp reads these too, from a file of another kind."""
    for ref in (entry.model for entry in recipe.models):
        if is_adapter(ref):
            fix = f"write it for llama.cpp: weightsmith convert-lora {ref.path} OUT --for llama.cpp --base BASE; or name the "
            fix += f"model with it: BASE+{ref.path}"
            raise PlanError([Unsupported("this is an adapter, not a model", where=ref.path, fix=fix)])


def replan(prepared: Prepared, written: Written) -> Prepared:
    """The same plan, reading results of other recipes from folders. Warnings stay those of the first plan."""
    assert prepared.request is not None
    again = assemble_request(prepared.request, written)
    again.draft.warnings = list(prepared.plan.warnings)
    return again.finish()


def _assemble(request: PlanRequest, written: Written) -> Prepared:
    recipe = request.recipe
    if not isinstance(recipe, Recipe):
        from weightsmith._features.mixture.build import assemble_mixture

        return assemble_mixture(request, written)
    if recipe.models and not request.is_copy and all(is_adapter(entry.model) for entry in recipe.models):
        from weightsmith._features.adapters.merge import assemble_adapters

        return assemble_adapters(request, written)
    what, problems = "only for merging adapters, and the models of this recipe are not adapters", list(request.problems)
    for name in ("adapter_rank", "adapter_space"):
        if getattr(request.options, name) != find_option(name).default:
            problems.append(option_error(name, what, f"leave out {named(name)}"))
    return assemble_recipe(replace(request, problems=tuple(problems)), written)
