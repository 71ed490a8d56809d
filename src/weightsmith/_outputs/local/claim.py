"""Is this staging folder ours? Its files are written in place and deleted, so a folder created by someone else is refused.

A folder is ours if it is empty, or if it holds our `lock` and either a journal with a readable line or nothing else. The
journal's first line is on disk before anything else is created, and the journal is removed last.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError
from weightsmith._base.files import file_kind
from weightsmith._outputs.journal import Entries, read_journal

LOCK, JOURNAL, SPACE, CONTENT, OLD, PRODUCTS, PARTS = "lock", "journal", "space", "content", "old", "products", "parts"
ADDRESS = "address"
"""Key of a note: the address of the output, if it is no local folder."""
OWNER = "process "
"""Start of the text in our locks."""

_FOLDERS = (CONTENT, OLD, PRODUCTS, PARTS)
_FILES = (LOCK, JOURNAL, SPACE)


def check_kinds(folder: Path) -> None:
    """Raise StoreError unless this is a folder whose entries have the right kinds, with a lock or journal if it is not empty.

    Opens only the journal. Another process may be building or removing the folder meanwhile.
    """
    mode = _mode(folder)
    if stat.S_ISLNK(mode):
        raise foreign(folder, "it is a symbolic link, which is not followed")
    if mode and not stat.S_ISDIR(mode):
        raise foreign(folder, "it is not a folder")
    names = _names(folder)
    for name in _FOLDERS:
        mode = _mode(folder / name)
        if mode and not stat.S_ISDIR(mode):
            raise foreign(folder, f"{name} in it is {file_kind(mode)}, not a folder")
    for name in _FILES:
        mode = _mode(folder / name)
        if mode and not stat.S_ISREG(mode):
            raise foreign(folder, f"{name} in it is {file_kind(mode)}, not a file")
    if names and LOCK not in names and not read_journal(folder / JOURNAL).lines:
        raise foreign(folder, f"it holds {names[0]!r}, but neither a lock nor a journal")


def check_made_by_us(folder: Path, lock_text: str, entries: Entries) -> None:
    """Raise StoreError unless the folder carries our marks. Call with the lock held, before writing to it."""
    if lock_text and not lock_text.startswith(OWNER):
        raise foreign(folder, f"the text in {LOCK} was not written by weightsmith")
    if entries.lines:
        return
    others = [
        name
        for name in _names(folder)
        if name != LOCK and not (name == JOURNAL and (lock_text or not (folder / name).lstat().st_size))
    ]
    if others:
        raise foreign(folder, f"it holds {others[0]!r}, but no journal of weightsmith")


def check_content(folder: Path) -> None:
    """Raise StoreError for a pipe, socket or device at the top level of the content."""
    for name in _names(folder):
        mode = _mode(folder / name)
        if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            raise foreign(folder, f"{name!r} in it is {file_kind(mode)}")


def foreign(folder: Path, why: str) -> StoreError:
    """The error for a staging folder that weightsmith did not create."""
    what = f"the folder for unfinished work exists, but was not created by weightsmith: {why}"
    fix = "move it away, or remove it, and run again; or choose another output folder"
    return StoreError(what, where=str(folder), fix=fix, state=NOTHING_WRITTEN)


def _mode(path: Path) -> int:
    """The mode of a path without following links; 0 if it does not exist."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  names alone, in one call
    except FileNotFoundError:
        return []
