"""`weightsmith tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.failures import wrote
from weightsmith._app.cli.work import tuning_interrupted, working
from weightsmith._base.errors import printable
from weightsmith._base.text import say
from weightsmith._execution.options import RunOptions
from weightsmith._planning.options import RecipeOptions
from weightsmith._reports.evaluate.options import EvaluateSettings
from weightsmith._reports.tuning.options import TuneSettings


@options.expand
def tune(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Recipe with values to tune, a YAML file; - for standard input.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Recipe to write, OUT.yml.")],
    planning: RecipeOptions,
    texts: EvaluateSettings,
    settings: TuneSettings,
    running: RunOptions,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="HTML page about the search.", show_default="OUT.html", rich_help_panel="Output"
        ),
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Find the values of a recipe that suit a text best.

    Give at least one --text, or a --command. Write {tune: [0, 1]} in place of a number, or {choice: [ties, dare_ties]} in
    place of another value. Candidates are merged in memory, not written. OUT is the recipe with the best values; its page
    says whether the gain holds on other text. Trials are kept beside it: if interrupted, run the same command again to
    resume.

    Examples:
        weightsmith tune recipe.yml tuned.yml --text mine.txt --budget 200
        weightsmith tune r.yml best.yml --text a.txt --report-text b.txt --time 30m
    """
    page = report or Path(out).with_suffix(".html")
    with working(
        "reading the models' headers", out=out, quiet=quiet, as_json=as_json, page=page, told=tuning_interrupted
    ) as work:
        from weightsmith._execution.progress import meter
        from weightsmith._reports.tuning.tune import tuned

        with meter(quiet=quiet) as shown:
            found = tuned(options.recipe_source(recipe), out, planning, texts, settings, running, shown)
        wrote(f"The recipe is complete: {printable(str(found.out))}")
        work.present(found.report())
        if work.shows:
            say(f"Recipe written: {printable(str(found.out))}")
