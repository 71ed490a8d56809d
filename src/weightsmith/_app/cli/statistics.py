"""`weightsmith statistics`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from weightsmith._activations.options import StatisticsSettings
from weightsmith._app.cli import options
from weightsmith._app.cli.work import show_warnings, working
from weightsmith._execution.options import RunOptions


@options.expand
def statistics(
    model: options.Model,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="A txt, jsonl or parquet file, or built-in.")],
    out: options.Out,
    settings: StatisticsSettings,
    running: RunOptions,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Measure MODEL on TEXT for merges, and write OUT.

    A recipe names OUT in place of the text: the model is then not measured again. OUT is created only when complete. If
    interrupted, run the same command again to resume.

    Examples:
        weightsmith statistics fr fr.txt fr-stats
        weightsmith statistics fr fr.txt fr-stats --kind fisher --rows 64
    """
    with working("reading the model's headers and the text", out=out, quiet=quiet, as_json=as_json) as work:
        from weightsmith._features.statistics import prepare_statistics

        with prepare_statistics(model, text, settings) as prepared:
            show_warnings(prepared)
            work.make(prepared, replace(running, card=False), "measuring")
