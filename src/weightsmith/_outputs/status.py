"""Tells who builds an output now, and how far the work is. Reads its staging folder, takes no lock, and changes nothing."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from weightsmith._base.errors import NotFound, StoreError
from weightsmith._outputs import disk
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.journal import read_journal
from weightsmith._outputs.local import LocalTarget
from weightsmith._outputs.locks import DRIVER, JOURNAL, LOCK, OWNER, PARTS, check_kinds, part_journals
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._outputs.places import place_of
from weightsmith._outputs.staging import staged_path

_HOLDER = re.compile(OWNER + r"(\d+) on (\S+)")
_JOURNAL_OF_PART = "journal-"


@dataclass(frozen=True, slots=True)
class Builder:
    """A process that builds an output, or did so last.

    part     label of its part, `2-of-4`; "": the whole, or it has others build the parts
    process  its number; 0: none, or the lock does not name it
    machine  its host name
    running  whether the process is there; None for none, and for one on another machine, which cannot be asked
    tensors  number that are finished, `total` all of them (0: not known)
    began, changed   when it took the lock, and when it last finished a tensor: seconds since 1970
    """

    part: str
    process: int
    machine: str
    running: bool | None
    tensors: int
    total: int
    began: float
    changed: float

    @property
    def done(self) -> bool:
        """All of its tensors are finished."""
        return 0 < self.total <= self.tensors


@dataclass(frozen=True, slots=True)
class BuildStatus:
    """How far an output is.

    out        its folder or address
    folder     its staging folder; None if there is no unfinished work on this machine
    published  a checkpoint of weightsmith is at `out`; always False for an address, which is not asked
    tensors    number that are finished in the staging folder, `total` all of them
    builders   the process of the whole first, then those of the parts
    """

    out: str
    folder: Path | None
    published: bool
    tensors: int
    total: int
    builders: tuple[Builder, ...]


def status(out: str | os.PathLike[str], *, staging: str | os.PathLike[str] | None = None) -> BuildStatus:
    """Who builds an output, and how far it is, also while it is being built.

    out      a folder, or an address
    staging  folder in which the work for an address is kept; None: the current folder

    Costs one reading of the journals: 15 MB for 100,000 tensors. Raises NotFound if nothing is there, StoreError for a staging
    folder that weightsmith did not make, and for what may not be read.

    >>> import weightsmith
    >>> weightsmith.status("nowhere")
    Traceback (most recent call last):
    weightsmith._base.errors.NotFound: nowhere: no output, and no unfinished work on it
      -> Write the OUT of the command that builds it; for an address, run this in the same folder, or add --staging.
    """
    try:
        return _status(out, staging)
    except OSError as error:
        what, fix = f"cannot be read: {error.strerror}", "change its permissions"
        raise StoreError(what, where=error.filename or str(out), fix=fix) from error


def _status(out: str | os.PathLike[str], staging: str | os.PathLike[str] | None) -> BuildStatus:
    target = place_of(out)
    path = staged_path(target, staging)
    folder = staging_folder(path)
    published = isinstance(target, LocalTarget) and (path / MANIFEST_NAME).is_file()
    if not folder.is_dir():
        if published:
            return BuildStatus(str(out), None, published, 0, 0, ())
        what = "no output, and no unfinished work on it"
        fix = "write the OUT of the command that builds it; for an address, run this in the same folder, or add --staging"
        raise NotFound(what, where=str(out), fix=fix)
    check_kinds(folder)
    whole = read_journal(folder / JOURNAL)
    if not whole.lines and not folder.is_dir():  # it has just been published
        return _status(out, staging)
    tensors = set(whole.tensors)
    parts = []
    for journal in part_journals(folder):
        part, label = read_journal(journal), journal.name.removeprefix(_JOURNAL_OF_PART)
        tensors |= part.tensors.keys()
        parts.append(_builder(folder / PARTS / f"lock-{label}", journal, label, len(part.tensors), part.total))
    leader = _builder(folder / LOCK, folder / JOURNAL, "", len(tensors), whole.total)
    if parts and not (folder / PARTS / DRIVER).exists():  # its process has only prepared the folder
        leader = replace(leader, process=0, machine="", running=None)
    builders = (leader, *sorted(parts, key=lambda builder: [int(n) for n in re.findall(r"\d+", builder.part)]))
    return BuildStatus(str(out), folder, published, len(tensors), whole.total, builders)


def _builder(lock: Path, journal: Path, part: str, tensors: int, total: int) -> Builder:
    text = (disk.read_own(lock, 4096) or b"").decode(errors="replace")
    holder = _HOLDER.match(text)
    process, machine = (int(holder[1]), holder[2]) if holder else (0, "")
    running = _is_running(process) if machine == socket.gethostname() else None
    return Builder(part, process, machine, running, tensors, total, _changed(lock), _changed(journal))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that large
        return False
    except PermissionError:  # another user's
        pass
    return True
