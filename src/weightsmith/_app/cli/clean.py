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
        from weightsmith._outputs.unfinished import find_unfinished
        from weightsmith._reports.evaluate.opening import find_evaluations

        found = [each for folder in folders or ["."] for each in find_unfinished(folder)]
        found += find_evaluations() if not folders else ()
        removable = [each for each in found if not each.reason]
        if yes:
            for each in removable:
                each.remove()
                wrote(f"Removed: {printable(str(each.folder))}")
        if as_json:
            facts = [
                {
                    "folder": str(each.folder),
                    "out": str(each.out),
                    "tensors": each.tensors,
                    "bytes": each.nbytes,
                    "changed": round(each.changed),
                    "removed": yes and not each.reason,
                    "kept_because": each.reason,
                }
                for each in found
            ]
            show_json(facts)
            return
        for each in found:
            if each.reason:
                note(f"not removable: {printable(str(each.folder))}: {printable(each.reason)}")
        if not removable:
            say("no unfinished work to remove")
            return
        rows = [
            (
                str(each.folder),
                f"{each.tensors:,}",
                size(each.nbytes),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(each.changed)),
            )
            for each in removable
        ]
        show_table(("unfinished work", "tensors", "stored", "last change"), rows, right={1, 2})
        folders_ = f"{count(len(removable), 'folder')}, {size(sum(each.nbytes for each in removable))}"
        command = shlex.join(["weightsmith", "clean", *(folders or []), "--yes"])
        say(f"removed {folders_}" if yes else f"{folders_}; the same merge resumes them; to remove them: {command}")
