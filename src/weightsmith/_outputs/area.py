"""The staging area of an output: a folder next to its final name, which one rename publishes.

    parent/
      out/                              the final name: nothing, or the checkpoint that will be replaced
      .out.weightsmith-staging/
        lock                            locked by the process that builds the output (`locks.py`)
        space                           reserves the space of the files that are not weights, until they are added
        journal                         which tensors are finished, with checksums
        content/                        becomes out/
        products/                       values computed before some tensors, one file each
        parts/                          locks and journals of processes that build one part each
        old/                            only where the file system cannot swap two names: the replaced checkpoint

The final name never shows an incomplete output. If publishing was cut off, the next run completes or undoes it. Arrays of
finished products are mapped from their files, so that a model's worth of them needs no memory.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Collection, Sequence
from io import BytesIO, FileIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import NOTHING_WRITTEN, Finding, StoreError, WeightsmithError
from weightsmith._base.files import open_regular, write_all
from weightsmith._base.tensors import TensorSpec
from weightsmith._files.arrays import is_mapped, map_arrays
from weightsmith._outputs import disk
from weightsmith._outputs.checksum import byte_view, hash_bytes
from weightsmith._outputs.journal import Entries, read_journal
from weightsmith._outputs.local import check_out, create_file, remove_checkpoint
from weightsmith._outputs.locks import CONTENT, JOURNAL, LOCK, OLD, PARTS, PRODUCTS, SPACE, Locks, check_content
from weightsmith._outputs.manifest import MANIFEST_NAME, hash_file, list_files
from weightsmith.abc.output import OtherFile

if TYPE_CHECKING:
    from weightsmith.abc.output import BytesLike


STAGING_SUFFIX = ".weightsmith-staging"


def staging_folder(out: Path) -> Path:
    """The staging folder of an output folder: in the same parent, so that publishing is a rename."""
    return out.parent / f".{out.name}{STAGING_SUFFIX}"


def left_behind(error: OSError | StoreError, where: Path | str, fix: str = "") -> Finding:
    """The warning that an output is published, while something that is no longer needed could not be removed.

    where  what remains, if the error does not say it
    fix    "": the error's
    """
    finding = Finding("") if isinstance(error, OSError) else error.finding
    reason = finding.what or (error.strerror if isinstance(error, OSError) else "") or str(error)
    what = f"the output is published and complete, but cleaning up failed: {reason}"
    return Finding(what, finding.where or str(where), finding.details, fix or finding.fix or f"remove {where} yourself")


class StagingArea:
    """The staging folder of one output.

    out       the final folder
    folder    the staging folder
    content   the folder in it that becomes `out`
    locks     those that this process holds in it
    """

    def __init__(self, out: Path) -> None:
        """Change nothing on disk."""
        self.out = out
        self.folder = staging_folder(out)
        self.content = self.folder / CONTENT
        self.locks = Locks(self.folder, out)

    # an interrupted publish

    def is_published(self, entries: Entries) -> bool:
        """Whether the output is there that a journal was about to publish."""
        return entries.published is not None and _published_identity(self.out) == entries.published

    def recover(self, entries: Entries) -> None:
        """Complete or undo a publish that was cut off. The folder may be gone afterwards: see `locks.held`."""
        old = self.folder / OLD
        if self.is_published(entries):
            self.remove_replaced()  # it was published; only what it replaced is left
            self.remove()
        elif entries.lines == 0:
            self.remove()  # cut off before anything was finished, or at the end of its removal
        elif entries.published is not None and self.content.is_dir() and not _is_inode(self.content, entries.published[1]):
            raise StoreError(
                f"an interrupted overwrite of {self.out} left the replaced checkpoint here, and the new one is no longer there",
                where=str(self.content),
                fix=f"move that checkpoint to where it belongs, or remove {self.folder}, and run again",
                state=NOTHING_WRITTEN,
            )
        elif old.is_dir() and not self.out.exists():
            old.rename(self.out)
        elif old.is_dir():
            what = f"an interrupted overwrite of {self.out} left the replaced checkpoint here, and a new folder has its name"
            raise StoreError(what, where=str(old), fix="move one of the two away and run again")

    # removing

    def remove_replaced(self) -> None:
        """Remove the checkpoint that the published one has replaced. Raises StoreError: see `remove_checkpoint`."""
        for folder in (self.content, self.folder / OLD):
            remove_checkpoint(folder)

    def remove_other_files(self, weights: set[str]) -> None:
        """Remove from the content what an earlier run added to these weight files; this run adds its own."""
        check_content(self.content)
        kept = {parent for name in weights for parent in (self.content / name).parents if parent != self.content}
        folders = [self.content]
        while folders:
            for entry in list(folders.pop().iterdir()):
                if entry.is_dir() and not entry.is_symlink():
                    if entry in kept:
                        folders.append(entry)
                    else:
                        disk.remove_tree(entry)
                elif entry.relative_to(self.content).as_posix() not in weights or entry.is_symlink():
                    entry.unlink()

    def empty(self) -> None:
        """Remove everything of ours but the lock; last the journal, which marks the rest as ours."""
        for name in (CONTENT, PRODUCTS, PARTS):
            disk.remove_tree(self.folder / name)
        (self.folder / SPACE).unlink(missing_ok=True)
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder and release the lock. The folder itself stays if it holds files that are not ours."""
        try:
            self.empty()
            (self.folder / LOCK).unlink()
            self.folder.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # another process has just started here, or the user put a file into it
                raise
        finally:
            self.locks.close()


def _is_inode(path: Path, inode: int) -> bool:
    # Not the device: after a reboot the same disk may have another number.
    return path.lstat().st_ino == inode


def _published_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a published checkpoint, None when there is none."""
    try:
        about = path.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(about.st_mode) or not (path / MANIFEST_NAME).exists():
        return None
    return about.st_dev, about.st_ino


def staged_plan(out: str | os.PathLike[str]) -> str:
    """The plan hash of interrupted work for this output folder, "" if there is none."""
    return read_journal(staging_folder(check_out(out)) / JOURNAL).plan


_COPY_BYTES = 1 << 20


class OtherFiles:
    """Files in the content folder of a staging area.

    records  size and checksum of each, by relative name
    """

    def __init__(self, content: Path) -> None:
        """Change nothing on disk."""
        self._content = content
        self.records: dict[str, OtherFile] = {}

    def add(self, name: str, data: BytesLike | Path) -> None:
        """Add bytes, or a copy of a file; see `Staging.add_file`. Raises OSError if it cannot be written."""
        with open_source(data) if isinstance(data, Path) else BytesIO(byte_view(data)) as source:
            with os.fdopen(create_file(self._content, PurePosixPath(name)), "wb") as target:
                while piece := read_source(source, str(data) if isinstance(data, Path) else name):
                    target.write(piece)
        self.records[name] = hash_file(self._content / name)

    def write(self, name: str, data: bytes | bytearray) -> OtherFile:
        """Write the index or the manifest, which `add` refuses; does not enter it in `records`. Raises OSError."""
        fd = create_file(self._content, PurePosixPath(name))
        try:
            write_all(fd, memoryview(data), 0)
        finally:
            os.close(fd)
        return OtherFile(len(data), hash_bytes(data))

    def check_names(self, weights: Collection[str]) -> None:
        """Raise StoreError if the folder holds anything but weight files, manifest and the files in `records`, or lacks one."""
        expected = {MANIFEST_NAME, *weights, *self.records}
        present = set(list_files(self._content))
        if present != expected:
            raise StoreError(
                "not published: the staging folder was changed by someone else",
                where=str(self._content),
                details=[f"not ours: {n}" for n in sorted(present - expected)]
                + [f"missing: {n}" for n in sorted(expected - present)],
                fix="run again: what is not ours is removed, and what is missing is written again",
                state=f"Everything is finished in {self._content.parent}",
            )

    def sync(self) -> None:
        """Make the files, and the names of all files, durable."""
        folders = {self._content}
        for name in (*self.records, MANIFEST_NAME):
            path = self._content / name
            folders |= {parent for parent in path.parents if parent.is_relative_to(self._content)}
            with path.open("rb") as file:
                os.fsync(file.fileno())
        for folder in sorted(folders):
            disk.fsync_folder(folder)


def open_source(path: Path) -> FileIO:
    """Open a file that becomes a file of the output. Raises StoreError."""
    try:
        return open_regular(path)
    except WeightsmithError as error:
        what = error.finding.what
        reason = what if what.startswith("cannot be read") else f"cannot be read: {what}"
        raise StoreError(reason, where=str(path), fix=error.finding.fix) from error


def read_source(source: FileIO | BytesIO, where: str, nbytes: int = _COPY_BYTES) -> bytes | None:
    """The next bytes of a source; -1: all. Raises StoreError, because OSError means that the output cannot be written."""
    try:
        return source.read(nbytes)
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=where) from error


Arrays = Sequence[npt.NDArray[Any]]

_PART = ".part"


class ProductFiles:
    """The files of products in a folder, one each."""

    def __init__(self, folder: Path) -> None:
        """Change nothing on disk."""
        self.folder = folder

    def path(self, name: str) -> Path:
        """The file of a product, named by the hash of the product's name, which may contain any character."""
        return self.folder / hash_bytes(name.encode())

    def create(self, name: str, outs: Sequence[TensorSpec]) -> Arrays | None:
        """Arrays of zeros, mapped from a new file that `write` will take over; None where the disk cannot take them."""
        part = self._part(name)
        try:
            self.folder.mkdir(exist_ok=True)
            fd = create_file(self.folder, PurePosixPath(part.name))
            try:
                disk.reserve(fd, sum(out.nbytes for out in outs))  # a full disk is an error now, and no SIGBUS later
                return map_arrays(fd, outs, mmap.ACCESS_WRITE)
            finally:
                os.close(fd)
        except OSError:
            _remove_file(part)
            return None

    def write(self, name: str, arrays: Arrays) -> str:
        """Write the arrays of a product one after another, and return their checksum; "" if they cannot be written.

        arrays  those of `create` are in the file already; others may be mapped, read-only, from files of their own

        The file gets its name when it is complete, because another process may be reading it. Nobody waits until it is on the
        disk: the checksum tells a resumed run if it is.
        """
        part = self._part(name)
        try:
            if not any(is_mapped(array) and array.flags.writeable for array in arrays):  # else they are in the file
                self.folder.mkdir(exist_ok=True)
                with os.fdopen(create_file(self.folder, PurePosixPath(part.name)), "wb") as file:
                    for array in arrays:
                        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            checksum = hash_file(part).xxh3_128
            part.replace(self.path(name))
        except OSError:
            _remove_file(part)
            return ""
        return checksum

    def read(self, name: str, outs: Sequence[TensorSpec], checksum: str) -> Arrays | None:
        """The arrays that `write` wrote, mapped; None if the file is missing or its checksum differs."""
        path = self.path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            about = os.fstat(fd)
            whole = stat.S_ISREG(about.st_mode) and about.st_size == sum(out.nbytes for out in outs)
            return map_arrays(fd, outs) if whole and hash_file(path).xxh3_128 == checksum else None
        except OSError:
            return None
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Remove the file of a product."""
        _remove_file(self.path(name))

    def remove_unfinished(self) -> None:
        """Remove what killed processes have left. Call while no other process works in the folder."""
        for path in self.folder.glob(f"*{_PART}"):
            _remove_file(path)

    def _part(self, name: str) -> Path:
        path = self.path(name)
        return path.with_name(f"{path.name}.{os.getpid()}{_PART}")


def _remove_file(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
