"""`weightsmith eval`, `tune`, `auto`, `write` and `statistics`: what reads texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import weightsmith
from weightsmith._activations.options import StatisticsSettings
from weightsmith._app.cli import options
from weightsmith._app.cli.failures import wrote
from weightsmith._app.cli.work import tuning_interrupted, working
from weightsmith._base.errors import printable
from weightsmith._base.text import count, say, show_json
from weightsmith._execution.options import RunOptions
from weightsmith._planning.options import RecipeOptions
from weightsmith._reports.options import AutoSettings, EvaluateSettings, TuneSettings, WriteSettings


@options.expand
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Folders, Hub ids, base+adapter, or recipes (.yml)."),
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
    read layer by layer, as they are stored. A recipe is merged in memory, not written. If interrupted, run the same command
    again to resume.

    In a jsonl file with `messages`, only the assistant's answers are scored, in the model's chat template.

    Examples:
        weightsmith eval ./base ./tuned ties.yml --text french.txt
        weightsmith eval ./tuned --text chats.jsonl --reference ./base
    """
    doing = "reading the models' headers"
    with working(doing, quiet=quiet, as_json=as_json, page=report, resumes=True) as work:
        from weightsmith._execution.progress import meter

        told = options.keywords("evaluate", settings, running) | {"text": _files(settings.text)}
        with meter(quiet=quiet) as shown:
            measured = weightsmith.evaluate(*models, reference=reference, progress=shown, **told)
        work.present(measured.report())


def _files(texts: Sequence[str]) -> list[str | Path]:
    """The files of an option, as paths: a string with a space, which is no file, would be a text in Python."""
    from weightsmith._activations.rows import is_text

    return [Path(text) if is_text(text) else text for text in texts]


# ---- weightsmith tune


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
            "--report",
            metavar="FILE",
            help="HTML report of the search.",
            show_default="OUT.html",
            rich_help_panel="Output",
        ),
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Find the recipe values that predict a text best.

    Give at least one --text, or a --command. Write {tune: [0, 1]} in place of a number, or {choice: [ties, dare_ties]} in place
    of another value. Candidates are merged in memory, not written. OUT is the recipe with the best values; its report says
    whether the gain holds on other text. Trials are kept next to it: if interrupted, run the same command again to resume.

    Examples:
        weightsmith tune recipe.yml tuned.yml --text mine.txt --budget 200
        weightsmith tune r.yml best.yml --text a.txt --report-text b.txt --time 30m
    """
    page = report or Path(out).with_suffix(".html")
    with working(
        "reading the models' headers", out=out, quiet=quiet, as_json=as_json, page=page, told=tuning_interrupted
    ) as work:
        from weightsmith._execution.progress import meter

        told = options.keywords("tune", planning, texts, settings, running)
        told |= {"text": _files(texts.text), "report_text": _files(settings.report_text)}
        with meter(quiet=quiet) as shown:
            tuning = weightsmith.tune(options.recipe_source(recipe), out, progress=shown, **told)
        wrote(f"The recipe is complete: {printable(str(tuning.out))}")
        work.present(tuning.report())
        if work.shows:
            say(f"Recipe written: {printable(str(tuning.out))}")


# ---- weightsmith auto


@options.expand
def auto(
    models: Annotated[
        list[str],
        typer.Argument(metavar="BASE MODEL...", help="Base, then its fine-tunes: folders, Hub ids or base+adapter."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to create.")],
    settings: AutoSettings,
    running: RunOptions,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be done and what it takes; write nothing.")] = False,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Measure several merges of fine-tunes, and write the best.

    Candidates are scored on held-out text: your text for each fine-tune, or text that the fine-tunes write themselves. The best
    candidate is written if it beats the plain mean by more than the noise, otherwise the mean. OUT/recipe.yml reproduces the
    merge. Texts, scores and a report are kept in OUT.auto: if interrupted, run the same command again to resume.

    Examples:
        weightsmith auto ./base ./fr ./de merged
        weightsmith auto ./base ./fr ./de merged --text fr=fr.txt --text de=de.txt
    """
    base, *fine_tunes = models
    with working("reading the models' headers", out=out, quiet=quiet, as_json=as_json) as work:
        from weightsmith._execution.progress import meter
        from weightsmith._reports.auto.auto import find_merge, plan_merge
        from weightsmith._reports.auto.pool import Models

        if plan:
            work.present(plan_merge(Models.of(base, fine_tunes), out, settings, running).report())
            return
        with meter(quiet=quiet) as shown:
            result = find_merge(Models.of(base, fine_tunes), out, settings, running, shown)
        wrote(f"The output is complete: {printable(str(result.out))}")
        work.present(result.report())


# ---- weightsmith write


@options.expand
def write(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, Hub id, base+adapter, or a recipe (.yml).")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Text to write, OUT.jsonl.")],
    settings: WriteSettings,
    running: RunOptions,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Let MODEL write text for statistics, calibration or tuning.

    Samples from the model's predictions, beginning with a start token and with the turns of its chat template. A well-trained
    fine-tune writes text of its domain: look at the file before you use it. The model is held in memory as float32.

    Examples:
        weightsmith write ./fr fr.jsonl
        weightsmith write ./base+./adapter own.jsonl --rows 40 --seed 1
    """
    with working("reading the model's headers", out=out, quiet=quiet, as_json=as_json) as work:
        from weightsmith._execution.progress import meter

        with meter(quiet=quiet) as shown:
            text_file = weightsmith.write(model, out, progress=shown, **options.keywords("write", settings, running))
        wrote(f"The text is complete: {printable(str(text_file.out))}")
        if as_json:
            show_json(text_file.to_json())
        elif work.shows:
            say(f"{count(text_file.rows, 'row')} written: {printable(str(text_file.out))}")
            starts = ", ".join(json.dumps(start, ensure_ascii=False) for start in text_file.starts)
            say(f"Rows begin with: {printable(starts)}")
            if text_file.unused_template:
                say(f"The chat template is not used: {printable(text_file.unused_template)}")


# ---- weightsmith statistics


@options.expand
def statistics(
    model: options.Model,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="A txt, jsonl or parquet file, built-in, or own: what MODEL writes by itself.")
    ],
    out: options.Out,
    settings: StatisticsSettings,
    running: RunOptions,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Collect statistics of MODEL on TEXT for merges, in OUT.

    Name OUT in a recipe in place of the text, and the model is not measured again. OUT is created only when complete. If
    interrupted, run the same command again to resume.

    Examples:
        weightsmith statistics fr fr.txt fr-stats
        weightsmith statistics fr own fr-stats --kind fisher --rows 64
    """
    with working("reading the model's headers and the text", out=out, quiet=quiet, as_json=as_json) as work:
        work.make(weightsmith.statistics, model, text, records=(settings, running))
