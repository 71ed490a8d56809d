"""`weightsmith diff`."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.work import working
from weightsmith._execution.options import RunOptions


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
        from weightsmith._reports.look.diff import diff as compare

        with meter(quiet=quiet) as shown:
            how: dict[str, Any] = {} if base is None else {"base": base}
            how |= {"tensors": tensors or (), "threads": running.threads, "stream": running.stream, "progress": shown}
            found = compare(*models, **how)
        work.present(found.report(), details=bool(tensors))
