"""The file of a page."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from weightsmith.errors import NOTHING_WRITTEN, OutputExists, StoreError
from weightsmith.formats.files import expand_user, real_path
from weightsmith.pages.html import GENERATOR, to_html
from weightsmith.pages.values import Page

_FIRST_BYTES = 500


def check_page(path: str | os.PathLike[str]) -> Path:
    """The path of a page that is to be written, before hours of work.

    Raises OutputExists for a file that is no page of weightsmith, which is not replaced; StoreError for a folder, and for a
    path in a folder that does not exist.
    """
    found = real_path(expand_user(os.fspath(path)))
    where = os.fspath(path)
    try:
        if not found.parent.is_dir():
            raise _refused(f"there is no folder {found.parent}", where)
        if os.path.lexists(found) and not found.is_file():
            raise _refused("it is no file", where)
        if found.exists():
            with found.open("rb") as file:
                ours = GENERATOR.encode() in file.read(_FIRST_BYTES)
            if not ours:
                what, fix = "the file exists, and is no report of weightsmith", "name another file, or remove this one"
                raise OutputExists(what, where=where, fix=fix, state=NOTHING_WRITTEN)
    except (OSError, ValueError) as error:
        raise _refused(str(error), where) from error
    return found


def write_page(path: str | os.PathLike[str], page: Page) -> Path:
    """Write a page, whole or not at all; an earlier page of that name is replaced. Raises as `check_page`."""
    found = check_page(path)
    data = to_html(page).encode(errors="replace")
    try:
        fd, name = tempfile.mkstemp(dir=found.parent, prefix=f".{found.name[:80]}.")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            mask = os.umask(0)
            os.umask(mask)
            Path(name).chmod(0o666 & ~mask)
            Path(name).replace(found)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _refused(str(error), os.fspath(path), state="") from error
    return found


def _refused(why: str, where: str, state: str = NOTHING_WRITTEN) -> StoreError:
    return StoreError(f"the report cannot be written: {why}", where=where, fix="name another file", state=state)
