"""`weightsmith verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.failures import failures
from weightsmith._base.errors import printable
from weightsmith._base.text import count, note, say, show_json, size, status_line


def verify(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder or address that weightsmith wrote.")],
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=1, help="Number of threads that read.")] = 2,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Check every byte of OUT against its checksums.

    Names each damaged tensor and file. Requires nothing but OUT.

    Examples:
        weightsmith verify merged
        weightsmith verify s3://bucket/merged --threads 8
    """
    with failures(checking=True, as_json=as_json), status_line("reading the manifest", quiet=quiet or as_json):
        from weightsmith._execution.progress import Reading, meter
        from weightsmith._outputs.places import verify as check

        with meter(quiet=quiet) as shown:
            report = check(
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
