"""`weightsmith clean`."""

from __future__ import annotations

import shlex
import time
from typing import Annotated

import typer

from weightsmith._app.cli import options
from weightsmith._app.cli.failures import failures, wrote
from weightsmith._base.text import count, note, say, show_json, show_table, size, status_line


def clean(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="Parents of output folders, s3://BUCKET/PREFIX, gs://, az://, or the output hf://ORG/NAME.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the unfinished work that is listed.")] = False,
    as_json: options.Json = False,
) -> None:
    """List and remove unfinished work of interrupted runs.

    Searches the current folder and the one of evaluations unless FOLDERs are named. Removes only folders that weightsmith made
    and that no process uses.
    In a bucket, aborts the uploads of interrupted runs.

    Examples:
        weightsmith clean
        weightsmith clean ./merges --yes
    """
    with failures(checking=True, as_json=as_json), status_line("looking for unfinished work", quiet=as_json):
        from weightsmith._base.errors import printable
        from weightsmith._outputs.places import find_unfinished
        from weightsmith._reports.evaluate.opening import find_evaluations

        unfinished = [work for folder in folders or ["."] for work in find_unfinished(folder)]
        unfinished += find_evaluations() if not folders else ()
        removable = [work for work in unfinished if not work.reason]
        if yes:
            for work in removable:
                work.remove()
                wrote(f"Removed: {printable(str(work.folder))}")
        if as_json:
            facts = [
                {
                    "folder": str(work.folder),
                    "out": str(work.out),
                    "tensors": work.tensors,
                    "bytes": work.nbytes,
                    "changed": round(work.changed),
                    "removed": yes and not work.reason,
                    "kept_because": work.reason,
                }
                for work in unfinished
            ]
            show_json(facts)
            return
        for work in unfinished:
            if work.reason:
                note(f"not removable: {printable(str(work.folder))}: {printable(work.reason)}")
        if not removable:
            say("no unfinished work to remove")
            return
        rows = [
            (
                str(work.folder),
                f"{work.tensors:,}",
                size(work.nbytes),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(work.changed)),
            )
            for work in removable
        ]
        show_table(("unfinished work", "tensors", "stored", "last change"), rows, right={1, 2})
        folders_ = f"{count(len(removable), 'folder')}, {size(sum(work.nbytes for work in removable))}"
        command = shlex.join(["weightsmith", "clean", *(folders or []), "--yes"])
        say(f"removed {folders_}" if yes else f"{folders_}; the same merge resumes them; to remove them: {command}")
