"""`weightsmith preview`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.work import show_warnings, working
from weightsmith._execution.options import RunOptions
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions


@options.expand
def preview(
    recipe: options.Recipe,
    planning: RecipeOptions,
    running: RunOptions,
    full: Annotated[bool, typer.Option("--full", help="Compute the whole merge instead of a sample; write nothing.")] = False,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Predict the effect of RECIPE on its models.

    Merges a sample of each tensor, in seconds, and writes nothing. Shows what survives of each model, by part and by layer:
    energy, flipped signs and dropped elements; and the distance from the base, and the cost of merging.

    Examples:
        weightsmith preview ties.yml
        weightsmith preview ties.yml --report preview.html
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # see diff.py
    with working("reading the recipe and the models' headers", quiet=quiet, as_json=as_json, page=report) as work:
        from weightsmith._execution.progress import meter
        from weightsmith._execution.summary import summarise
        from weightsmith._features.any_recipe import prepare_any
        from weightsmith._reports.look.preview import preview_of

        with prepare_any(options.recipe_source(recipe), planning, QuantizeSettings(), check=True) as prepared:
            show_warnings(prepared)
            summary = summarise(prepared, running)
            with meter(quiet=quiet) as shown:
                found = preview_of(prepared, full=full, threads=running.threads, progress=shown)
            costs = {
                "read_bytes_at_most": summary.read_bytes,
                "write_bytes": summary.write_bytes,
                "peak_memory_bytes": summary.memory.peak_bytes,
                "threads": summary.memory.threads,
            }
            work.present(found.report(costs))
