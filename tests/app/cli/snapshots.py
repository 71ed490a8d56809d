"""Texts of the command line that are kept as files: what a user sees, for a person to read in a review.

python -m tests.app.cli.snapshots            # say which are out of date
python -m tests.app.cli.snapshots --write    # write them anew
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from typer.main import get_command

from weightsmith._app.cli.app import app
from weightsmith._app.cli.help import overview, page_of, terminal_width

FOLDER = Path(__file__).parent / "snapshots"
WIDTHS = (80, 120)


def help_pages() -> dict[str, str]:
    """The help of the program and of each command, at both widths, by file name."""
    program = get_command(app)
    before = os.environ.get("COLUMNS")
    found = {}
    try:
        for columns in WIDTHS:
            os.environ["COLUMNS"] = str(columns)
            width = terminal_width()
            found[f"help-{columns}/weightsmith.txt"] = f"{overview(program, 'weightsmith').lines(width)}\n"
            for name, command in program.commands.items():  # type: ignore[attr-defined]
                found[f"help-{columns}/{name}.txt"] = f"{page_of(command, f'weightsmith {name}').lines(width)}\n"
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return found


def stale(found: Mapping[str, str], pattern: str) -> list[str]:
    """The files that are missing or differ, and those that nothing makes. pattern: the files of this kind."""
    there = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.glob(pattern)}
    return sorted(name for name in {*found, *there} if found.get(name) != there.get(name))


def write(found: Mapping[str, str], pattern: str) -> list[str]:
    """Write the files that are out of date, and remove those that nothing makes: their names."""
    wrong = stale(found, pattern)
    for name in wrong:
        path = FOLDER / name
        if name in found:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found[name])
        else:
            path.unlink()
    return wrong


def main() -> None:
    """Write or check."""
    names = (write if "--write" in sys.argv else stale)(help_pages(), "help-*/*.txt")
    for name in names:
        print(f"{name}: {'written' if '--write' in sys.argv else 'out of date'}")


if __name__ == "__main__":
    main()
