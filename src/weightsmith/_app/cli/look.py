"""`weightsmith inspect`, `diff`, `preview`, `verify` and `status`: what looks at models, before and after."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

import weightsmith
from weightsmith._app.cli import options
from weightsmith._app.cli.failures import failures
from weightsmith._app.cli.work import show_warnings, working
from weightsmith._base.errors import printable
from weightsmith._base.text import count, duration, note, say, show_json, show_table, size, status_line
from weightsmith._execution.options import RunOptions
from weightsmith._planning.options import RecipeOptions

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
            note(f"not part of this checkpoint, and not checked: {printable(', '.join(report.extra))}")
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
        if progress.folder is None:
            return
        total = f" of {progress.total:,}" if progress.total else ""
        say(f"{printable(progress.out)}: {progress.tensors:,}{total} tensors are finished")
        rows = [
            (
                f"part {builder.part.replace('-', ' ')}" if builder.part else "all",
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
    return {True: "running", False: "ended", None: "on another machine"}[builder.running]
