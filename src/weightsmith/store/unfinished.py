"""Staging folders that interrupted runs have left: found, described, removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weightsmith.containers import Layout
from weightsmith.errors import StoreError
from weightsmith.store import disk
from weightsmith.store.claim import JOURNAL, LOCK, check_kinds
from weightsmith.store.journal import read_journal
from weightsmith.store.staging import STAGING_SUFFIX, Staging


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A folder that bears the name of a staging folder.

    tensors  finished ones
    nbytes   that it takes on the disk
    changed  seconds since the epoch: the last tensor was finished, or the folder was made
    reason   why it may not be removed: a process works in it, or it is not ours; "" if it may be
    """

    folder: Path
    tensors: int
    nbytes: int
    changed: float
    reason: str = ""

    @property
    def out(self) -> Path:
        """The output folder that it is for."""
        return self.folder.parent / self.folder.name[1:].removesuffix(STAGING_SUFFIX)


def find_unfinished(parent: Path) -> Iterator[Unfinished]:
    """The staging folders in a folder. Nothing is changed, and no lock is held afterwards."""
    for folder in sorted(parent.glob(f".*{STAGING_SUFFIX}")):
        try:
            check_kinds(folder)
            entries = read_journal(folder / JOURNAL)
            last = next((path for path in (folder / JOURNAL, folder / LOCK) if path.exists()), folder)
            about = len(entries.tensors), _disk_bytes(folder), last.stat().st_mtime
            yield Unfinished(folder, *about, "a process is working in it" if _is_locked(folder) else "")
        except FileNotFoundError:
            continue  # removed by its owner at this moment
        except StoreError as error:
            yield Unfinished(folder, 0, 0, folder.lstat().st_mtime, error.finding.what)


def remove_unfinished(found: Unfinished) -> None:
    """Remove a staging folder, or finish the publishing that was cut off in it.

    Raises Busy while a process works in it, StoreError for a folder that is not ours, or that holds a checkpoint which an
    interrupted --overwrite was about to replace.
    """
    nothing = Layout((), {}, None, 0)
    with Staging(found.out, nothing, "", {}, overwrite=False, protected=(), other_bytes=0) as staging:
        staging.recover()
        if staging.is_open:
            staging.discard()


def _is_locked(folder: Path) -> bool:
    """Some process holds the lock. To see that of a part, a lock that is free is held for a moment."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        disk.lock(fd)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _disk_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):
                total += (Path(root) / name).lstat().st_blocks * 512
    return total
