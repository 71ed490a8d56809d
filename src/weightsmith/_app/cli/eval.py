"""`weightsmith eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.work import working
from weightsmith._execution.options import RunOptions
from weightsmith._reports.evaluate.options import EvaluateSettings


@options.expand
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Folders, Hub ids, base+adapter, or recipes (.yml), which are not merged."),
    ],
    settings: EvaluateSettings,
    running: RunOptions,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference", metavar="MODEL", help="Compare the predictions with those of MODEL: KL divergence, agreement."
        ),
    ] = None,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Measure how well models predict texts.

    Shows perplexity and bits per byte, and the difference from the first model with its standard error over rows. Models are
    read as they are stored, layer by layer. The result of a recipe is computed, and not written. If interrupted, run the same
    command again to resume.

    In a jsonl file with `messages`, the assistant's answers are scored, in the model's chat template.

    Examples:
        weightsmith eval ./base ./tuned ties.yml --text french.txt
        weightsmith eval ./tuned --text chats.jsonl --reference ./base
    """
    doing = "reading the models' headers"
    with working(doing, quiet=quiet, as_json=as_json, page=report, resumes=True) as work:
        from weightsmith._execution.progress import meter
        from weightsmith._reports.evaluate.measure import evaluation, named

        with meter(quiet=quiet) as shown:
            found = evaluation(named(models, reference), reference is not None, settings, running, shown)
        work.present(found.report())
