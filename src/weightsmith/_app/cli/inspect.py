"""`weightsmith inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.work import working
from weightsmith._execution.options import RunOptions


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

    Layers, parameters, dtypes, vocabulary, quantisation, licence. Reads headers only, unless --stats is given; those of Hub
    models by byte range.

    Examples:
        weightsmith inspect org/model
        weightsmith inspect ./merged --stats
    """
    with working("reading the model's headers", quiet=quiet, as_json=as_json, page=report) as work:
        from weightsmith._execution.progress import meter
        from weightsmith._reports.look.inspect import inspect as look

        with meter(quiet=quiet or not stats) as shown:
            found = look(
                model, tensors=tensors or (), stats=stats, threads=running.threads, stream=running.stream, progress=shown
            )
        work.present(found.report(), details=bool(tensors))
