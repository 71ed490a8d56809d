"""`weightsmith merge`."""

from __future__ import annotations

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.mergekit_flags import answer
from weightsmith._app.cli.work import show_warnings, working
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions


@options.expand
def merge(
    context: typer.Context,
    recipe: options.Recipe,
    out: options.Out,
    planning: RecipeOptions,
    settings: QuantizeSettings,
    running: RunOptions,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Merge checkpoints into OUT as RECIPE describes.

    OUT is created only when complete. If interrupted, run the same command again to resume.

    Examples:
        weightsmith merge ties.yml merged
        weightsmith merge ties.yml merged-q4 --quantize gguf-q4_k_m --threads 8
    """
    options.check_order(recipe, out)
    with working("reading the recipe and the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        answer(context, quiet=quiet)
        from weightsmith._features.any_recipe import prepare_any

        with prepare_any(options.recipe_source(recipe), planning, settings, command="merge") as prepared:
            show_warnings(prepared)
            work.make(prepared, running, "merging")
