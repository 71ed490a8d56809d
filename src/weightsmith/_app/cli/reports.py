"""Commands that look at models, before and after: `weightsmith inspect`, `diff`, `preview`, `verify` and `status`; and commands
that read texts: `eval`, `tune`, `auto`, `write` and `statistics`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import weightsmith
from weightsmith._activations.options import StatisticsSettings
from weightsmith._app.cli import options
from weightsmith._app.cli.failures import failures, wrote
from weightsmith._app.cli.work import auto_interrupted, show_warnings, tuning_interrupted, working
from weightsmith._base.errors import printable
from weightsmith._base.text import count, duration, note, say, show_json, show_table, size, status_line
from weightsmith._execution.options import RunOptions
from weightsmith._planning.options import RecipeOptions
from weightsmith._reports.options import AutoSettings, EvaluateSettings, TuneSettings, WriteSettings

if TYPE_CHECKING:
    from weightsmith._outputs.places import Builder


@options.expand
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, weight file, Hub id, base+adapter or adapter.")],
    running: RunOptions,
    tensors: Annotated[
        list[str] | None, typer.Argument(metavar="[GLOB]...", help="Only tensors whose names match.", show_default=False)
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the tensors; show norms, extremes, zeros, NaN and outlier rows.")
    ] = False,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Describe a model or an adapter.

    Shows layers, parameters, dtypes, vocabulary, quantisation and licence. Reads only headers unless --stats is given, even
    from the Hub.

    Examples:
        weightsmith inspect org/model
        weightsmith inspect ./merged --stats
    """
    with working("reading the model's headers", quiet=quiet, as_json=as_json, page=report) as work:
        from weightsmith._execution.progress import meter

        with meter(quiet=quiet or not stats) as shown:
            told = options.keywords("inspect", running)
            inspection = weightsmith.inspect(model, tensors=tensors or (), stats=stats, progress=shown, **told)
        work.present(inspection.report(), details=bool(tensors))


# ---- weightsmith diff


@options.expand
def diff(
    models: Annotated[list[str], typer.Argument(metavar="A B...", help="Folders, weight files, Hub ids or base+adapter.")],
    running: RunOptions,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="BASE", help="Compare the task vectors of two or more models: their deltas from BASE."),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option("--tensors", metavar="GLOB", help="Show tensors whose names match, one row each (repeatable)."),
    ] = None,
    report: options.PageFile = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Compare two models, or the task vectors of several.

    Compares weights, config, tokenizer and chat template, and summarises the differences. For each part and layer: the share
    of elements that differ, the norm of the delta relative to A, the cosine of A and B, and the rank of the deltas.

    With --base, compares the task vectors of two or more models in pairs: cosines, sign conflicts, shared largest elements,
    shared leading directions.

    Examples:
        weightsmith diff ./base ./tuned
        weightsmith diff --base ./base ./french ./german --report diff.html
    """
    # Each thread decomposes small matrices of its own: BLAS's threads would only wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with working("reading the models' headers", quiet=quiet, as_json=as_json, page=report) as work:
        from weightsmith._execution.progress import meter

        told = options.keywords("diff", running) | ({} if base is None else {"base": base})
        with meter(quiet=quiet) as shown:
            comparison = weightsmith.diff(*models, tensors=tensors or (), progress=shown, **told)
        work.present(comparison.report(), details=bool(tensors))


# ---- weightsmith preview


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

    Merges a sample of each tensor, in seconds, and writes nothing. Shows how much of each model survives, by part and by layer
    (energy, flipped signs, dropped elements), the distance from the base, and the cost of the merge.

    Examples:
        weightsmith preview ties.yml
        weightsmith preview ties.yml --report preview.html
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # see diff.py
    with working("reading the recipe and the models' headers", quiet=quiet, as_json=as_json, page=report) as work:
        from weightsmith._execution.progress import meter

        told = options.keywords("preview", planning, running)
        with meter(quiet=quiet) as shown:
            shown.announce = show_warnings
            previewed = weightsmith.preview(options.recipe_source(recipe), full=full, progress=shown, **told)
        work.present(previewed.report())


# ---- weightsmith verify


def verify(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder or address that weightsmith wrote.")],
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, help="Number of threads that read.")] = 2,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Check every byte of OUT against its checksums.

    Names each damaged tensor and file. Needs only OUT, not the models.

    Examples:
        weightsmith verify merged
        weightsmith verify s3://bucket/merged --threads 8
    """
    with failures(checking=True, as_json=as_json), status_line("reading the manifest", quiet=quiet or as_json):
        from weightsmith._execution.progress import Reading, meter

        with meter(quiet=quiet) as shown:
            report = weightsmith.verify(
                out,
                threads=threads,
                progress=lambda done, total: shown.show(Reading("verifying", done, total, done)),
            )
        if report.extra and not quiet:
            note(f"not part of this checkpoint, so not checked: {printable(', '.join(report.extra))}")
        if as_json:
            facts = {
                "folder": str(report.folder),
                "plan": report.plan,
                "tensors": report.tensors,
                "files": report.files,
                "bytes": report.nbytes,
                "extra": list(report.extra),
            }
            show_json(facts)
        elif not quiet:
            say(
                f"{printable(str(report.folder))}: OK, {count(report.tensors, 'tensor')} and "
                f"{count(report.files, 'other file')} match their checksums ({size(report.nbytes)})"
            )


# ---- weightsmith status


def status(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder or address that is being built.")],
    staging: Annotated[
        str | None,
        typer.Option("--staging", metavar="FOLDER", help="Folder with the work for an address.", show_default="current folder"),
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Show the progress of a run that is building OUT.

    Reads the unfinished work next to OUT, and does not disturb the run.

    Examples:
        weightsmith status ./merged
        weightsmith status s3://bucket/merged --staging /scratch
    """
    with failures(checking=True, as_json=as_json), status_line("reading the journals", quiet=quiet or as_json):
        progress = weightsmith.status(out, staging=staging)
        if as_json:
            show_json(asdict(progress) | {"folder": None if progress.folder is None else str(progress.folder)})
            return
        if progress.published:
            say(f"{printable(progress.out)}: complete" + ", and being replaced" * (progress.folder is not None))
        if not progress.builders:
            return
        total = f" of {progress.total:,}" if progress.total else ""
        say(f"{printable(progress.out)}: {progress.tensors:,}{total} tensors are finished")
        rows = [
            (
                f"{'part ' * ('-of-' in builder.part)}{builder.part.replace('-', ' ')}" if builder.part else "all",
                _progress(builder),
                f"{builder.process} on {printable(builder.machine)}" if builder.process else "",
                _state(builder),
                f"{duration(max(0.0, time.time() - builder.changed))} ago",
            )
            for builder in progress.builders
        ]
        show_table(("builds", "tensors", "process", "", "last change"), rows, right={1})


def _progress(builder: Builder) -> str:
    return f"{builder.tensors:,} of {builder.total:,}" if builder.total else f"{builder.tensors:,}"


def _state(builder: Builder) -> str:
    if builder.part and builder.done:
        return "done"
    if not builder.process:
        return ""
    if builder.stopped:
        return "stopped"
    return {True: "running", False: "ended", None: "on another machine"}[builder.running]


# ---- What reads texts


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
    with working("reading the models' headers", out=out, quiet=quiet, as_json=as_json, told=auto_interrupted) as work:
        from weightsmith._execution.progress import meter

        told = options.keywords("auto", settings, running)
        if plan:
            work.present(weightsmith.plan_auto(base, fine_tunes, out, **told).report())
            return
        with meter(quiet=quiet) as shown:
            result = weightsmith.auto(base, fine_tunes, out, progress=shown, **told)
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
