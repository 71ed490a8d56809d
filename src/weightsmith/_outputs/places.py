"""Finds where an output is: a local folder, an address in a bucket, on the Hub, or of a scheme that a package brings.

It also finds, describes and removes the staging folders that interrupted runs have left there, and tells who builds an output
now, and how far the work is.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, NotFound, StoreError, UnknownName
from weightsmith._base.files import is_folder
from weightsmith._base.plugins import Plugins
from weightsmith._base.process import is_running
from weightsmith._outputs import disk, locks
from weightsmith._outputs.area import STAGING_SUFFIX, StagingArea, staging_folder
from weightsmith._outputs.journal import read_journal
from weightsmith._outputs.local import LocalTarget, is_address
from weightsmith._outputs.locks import ADDRESS, DRIVER, JOURNAL, LOCK, OWNER, PARTS, check_kinds, part_journals
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._outputs.staging import staged_path
from weightsmith.abc.output import OutputScheme, PartProgress, Progress, Target, Unfinished, Verified

SCHEMES = Plugins(
    "scheme of outputs",
    "weightsmith.outputs",
    OutputScheme,
    {
        "hf": "weightsmith._outputs.hub:SCHEME",
        "s3": "weightsmith._outputs.bucket:SCHEME",
        "gs": "weightsmith._outputs.bucket:SCHEME",
        "az": "weightsmith._outputs.bucket:SCHEME",
    },
)
"""The places of outputs by the scheme of their addresses, imported when an output has one."""


def place_of(out: str | os.PathLike[str]) -> Target:
    """The target of an output. Reads nothing.

    Raises StoreError (PushFailed) for an address that no output can have; a local path is checked when it is used.

    >>> [place_of(out).name for out in ("models/merged", "s3://bucket/models/merged", "hf://org/merged@v2")]
    ['merged', 'merged', 'merged']
    """
    return scheme_of(str(out)).target(str(out)) if is_address(out) else LocalTarget(os.fspath(out))


def scheme_of(address: str) -> OutputScheme:
    """The scheme of an address. Raises StoreError for one that is not written to, and PluginError."""
    scheme, _, rest = address.partition("://")
    try:
        return SCHEMES.get(scheme.lower())
    except UnknownName as error:
        shown = f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"  # no key or password in a message
        fix = f"write to a local folder, or to {', '.join(f'{name}://' for name in SCHEMES.names)}"
        what = f"cannot be the output: {error.finding.what}"
        raise StoreError(what, where=shown, fix=fix, state=NOTHING_WRITTEN) from None


def verify(folder: str | os.PathLike[str], *, threads: int = 2, progress: Progress | None = None) -> Verified:
    """Compare every byte of a checkpoint with its manifest.

    folder    a folder, or an address: `s3://bucket/prefix`, `hf://org/name[@branch]`
    threads   threads that read and hash, with 4 MiB of memory each; an address is read by 8, with 16 MiB each
    progress  called with (bytes of tensors done, bytes of all tensors)

    Raises Corrupt. Its details name every damaged tensor, header and file, and every missing file. They also name foreign
    files that a loader would read: weights, adapters, a tokenizer. Raises NotFound if there is no manifest, and FormatError if
    weightsmith did not write it.
    """
    return place_of(folder).verify(threads=threads, progress=progress)


def find_unfinished(where: str) -> Iterator[Unfinished]:
    """The unfinished work for outputs in a folder, or at an address: under a prefix of a bucket, for a model on the Hub.

    Nothing is changed, and no lock is held afterwards. Raises NotFound, StoreError.
    """
    if is_address(where):
        yield from scheme_of(where).unfinished(where)
    elif is_folder(Path(where)):
        yield from find_folders(Path(where))
    else:
        raise NotFound("no such folder", where=where, fix="write the folder that the output folder is in")


def find_folders(parent: Path) -> Iterator[Unfinished]:
    """The staging folders in a folder. Nothing is changed, and no lock is held afterwards. Raises StoreError."""
    try:
        names = sorted(path.name for path in parent.iterdir())
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=str(parent), fix="change its permissions") from error
    for folder in (parent / name for name in names if name.startswith(".") and name.endswith(STAGING_SUFFIX)):
        area = StagingArea(folder.parent / folder.name[1:].removesuffix(STAGING_SUFFIX))
        unfinished = partial(Unfinished, area.out, folder, remove=partial(remove_work, area.out))
        try:
            check_kinds(folder)
            entries = read_journal(folder / JOURNAL)
            last = next((path for path in (folder / JOURNAL, folder / LOCK) if path.exists()), folder)
            about = len(entries.tensors), _disk_bytes(folder), last.stat().st_mtime
            yield unfinished(*about, "a process is working in it" if locks.is_held(folder) else "")
        except FileNotFoundError:
            continue  # its owner has just removed it
        except StoreError as error:
            yield unfinished(0, 0, folder.lstat().st_mtime, error.finding.what)


def remove_work(out: Path) -> None:
    """Remove the staging folder of an output, or finish the publishing that was cut off in it.

    What it has put elsewhere is removed too. Raises Busy while a process works in it, StoreError for a folder that is not ours,
    or that holds a checkpoint replaced by an interrupted --overwrite.
    """
    area = StagingArea(out)
    with closing(area.locks):
        entries = area.locks.take()
        area.recover(entries)
        if area.locks.held:
            if address := entries.notes.get(ADDRESS):
                place_of(str(address)).discard(entries.notes)
            area.remove()


def remove_published(out: Path, target: Target | None = None) -> None:
    """Remove the staging folder of a run that died after it had published this output; leave any other work.

    target  of the output; None: the folder
    """
    area = StagingArea(out)
    with suppress(StoreError, OSError):
        entries = read_journal(area.folder / JOURNAL)
        if not area.folder.is_dir():
            return
        is_published = area.is_published(entries) or (target is not None and target.recover(entries.notes))
        if entries.lines == 0 or is_published:  # the journal is removed last
            remove_work(out)


def _disk_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):
                total += (Path(root) / name).lstat().st_blocks * 512
    return total


# ---- who builds an output now


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
    stopped  it is there, but stopped by a signal (SIGSTOP) or a debugger; other processes may be waiting for it
    done     all of its tensors are finished; a part may have none, if there are more parts than weight files
    """

    part: str
    process: int
    machine: str
    running: bool | None
    tensors: int
    total: int
    began: float
    changed: float
    stopped: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class BuildStatus:
    """How far an output is.

    out        its folder or address
    folder     its staging folder; None if there is no unfinished work on this machine: that of parts in a bucket is there
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
    weightsmith._base.errors.NotFound: nowhere: no output and no unfinished work
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
        if target.leaderless and (recorded := target.recorded()):
            return _recorded_status(target, recorded)
        what = "no output and no unfinished work"
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


def _recorded_status(target: Target, recorded: Sequence[PartProgress]) -> BuildStatus:
    """The status by what a target has recorded of the parts."""
    builders = [
        Builder(p.part, p.process, p.machine, p.running, len(p.tensors), p.total, p.began, p.changed, done=p.done)
        for p in sorted(recorded, key=lambda p: [int(n) for n in re.findall(r"\d+", p.part)])
    ]
    tensors = {name for p in recorded for name in p.tensors}
    return BuildStatus(str(target), None, False, len(tensors), max(p.plan_total for p in recorded), tuple(builders))


def _builder(lock: Path, journal: Path, part: str, tensors: int, total: int) -> Builder:
    text = (disk.read_own(lock, 4096) or b"").decode(errors="replace")
    holder = _HOLDER.match(text)
    process, machine = (int(holder[1]), holder[2]) if holder else (0, "")
    running = is_running(process) if machine == socket.gethostname() else None
    stopped = running is True and _is_stopped(process)
    done = 0 < total <= tensors
    return Builder(part, process, machine, running, tensors, total, _changed(lock), _changed(journal), stopped, done)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_stopped(process: int) -> bool:
    """Whether a process is stopped. Linux only: elsewhere False."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[:1] in (["T"], ["t"])
    except OSError:
        return False
