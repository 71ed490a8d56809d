"""The folder in which a checkpoint is built, beside its final name, until one rename publishes it.

    parent/
      out/                              the final name: nothing, or the checkpoint that will be replaced
      .out.weightsmith-staging/
        lock                            held (flock) by the process at work; holds its id
        journal                         which tensors are finished, with checksums
        content/                        becomes out/
        router                          router weights of a mixture, so that they are not computed again
        old/                            only where the file system cannot swap two names: the replaced checkpoint

Nothing half-made ever stands under the final name. Work that is interrupted at any point, power loss included, goes
on from the journal; what the journal says is compared with the bytes on disk first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import threading
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from weightsmith.errors import NOTHING_WRITTEN, CannotResume, NoSpace, OutputExists, StoreError
from weightsmith.store import disk
from weightsmith.store.checksum import byte_view, grain_bytes, hash_bytes
from weightsmith.store.journal import Entries, Journal, read_journal
from weightsmith.store.layout import INDEX_NAME, Layout
from weightsmith.store.manifest import MANIFEST_NAME, OtherFile, encode_manifest
from weightsmith.store.reread import Progress, Stored, reread
from weightsmith.store.target import check_file_name, check_out, check_vacant, create_file
from weightsmith.store.weight_file import WeightFile

if TYPE_CHECKING:
    from weightsmith.store.checksum import BytesLike

_COPY_BYTES = 1 << 20
_BOOKKEEPING_BYTES = 400  # of journal and manifest, for each tensor
_CHECKSUM = re.compile("[0-9a-f]{32}")


def staging_folder(out: Path) -> Path:
    """The staging folder of an output folder: in the same parent, so that publishing is a rename."""
    return out.parent / f".{out.name}.weightsmith-staging"


def staged_plan(out: str | os.PathLike[str]) -> str:
    """The plan hash of interrupted work for this output folder, "" if there is none."""
    return read_journal(staging_folder(check_out(out)) / "journal").plan


class Staging:
    """A checkpoint being built. Made by `Staging.open`; `publish` ends it well, `close` leaves a resumable state.

    out        the final folder
    folder     the staging folder, for messages
    layout     where every byte goes
    plan_hash  identity of the plan; only work of the same plan is resumed

    `write`, `finish`, `location` and `finished` may be used from any thread, for different tensors or parts of one.
    As a context manager it is closed at the end, whatever happened; what was staged is kept.
    """

    def __init__(self, out: Path, layout: Layout, plan_hash: str, *, overwrite: bool) -> None:
        """Use `Staging.open`."""
        self.out = out
        self.folder = staging_folder(out)
        self.layout = layout
        self.plan_hash = plan_hash
        self._content = self.folder / "content"
        self._overwrite = overwrite
        self._lock_fd = -1
        self._weights: list[WeightFile] = []
        self._journal: Journal | None = None
        self._checksums: dict[str, str] = {}
        self._files: dict[str, OtherFile] = {}
        self._mutex = threading.Lock()

    # opening

    @classmethod
    def open(
        cls,
        out: str | os.PathLike[str],
        layout: Layout,
        plan_hash: str,
        *,
        resume: bool = True,
        overwrite: bool = False,
        threads: int = 2,
        progress: Progress | None = None,
    ) -> Staging:
        """Make the staging folder, or take up the one of an interrupted run; reserve all space; write the headers.

        out        the final folder: new, empty, or (with `overwrite`) a checkpoint that `publish` will replace; folders on
                   the way to it are made, and stay whatever happens
        resume     False discards what an earlier run left
        threads, progress   of re-reading the finished tensors; progress(bytes done, bytes in all)

        Raises OutputExists, CannotResume (another plan's work is there), NoSpace, and StoreError for a folder that
        cannot be written or that another process is building. Nothing is written then, except that resumable work
        stays.
        """
        staging = cls(check_out(out), layout, plan_hash, overwrite=overwrite)
        try:
            staging._open(resume, threads, progress)
        except OSError as error:
            staging.close()
            if error.errno in disk.FULL:
                raise disk.no_space(staging.out.parent, layout.total_bytes, state=NOTHING_WRITTEN, cause=error) from error
            raise StoreError(
                f"cannot be prepared: {error.strerror}", where=str(staging.folder), fix="choose another output folder"
            ) from error
        except BaseException:
            staging.close()
            raise
        return staging

    def _open(self, resume: bool, threads: int, progress: Progress | None) -> None:
        entries = Entries()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        if self.folder.exists():
            self._take_lock()
            entries = self._recover()
        check_vacant(self.out, overwrite=self._overwrite)
        if self._lock_fd < 0:
            self._take_lock()
            entries = read_journal(self.folder / "journal")  # another process may have come and gone meanwhile
        fresh = not self._resumable(entries, resume)
        if fresh:
            self._wipe()
            self._content.mkdir()
        self._remove_other_files()
        try:
            self._reserve()
            self._journal = Journal(self.folder / "journal")
            if fresh:
                self._journal.start(self.plan_hash, self._layout_hash())
        except (NoSpace, OSError):
            if fresh:
                self.discard()
            raise
        self._recheck({} if fresh else entries.tensors, threads, progress)

    def _take_lock(self) -> None:
        """Hold `lock`, making the folder if need be. The loop is for a folder that its owner removes at this moment."""
        for _ in range(100):
            self.folder.mkdir(exist_ok=True)
            if self.folder.is_symlink():
                raise StoreError("is a symbolic link, and is not followed", where=str(self.folder), fix="remove it")
            path = self.folder / "lock"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except FileNotFoundError:
                continue
            try:
                _flock(fd, path)
                if path.stat().st_ino == os.fstat(fd).st_ino:
                    self._lock_fd = fd
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                    return
            except FileNotFoundError:
                pass
            except BlockingIOError:
                owner = os.pread(fd, 300, 0).decode(errors="replace") or "another process"
                raise StoreError(
                    f"{owner} is building this output now",
                    where=str(self.out),
                    fix="wait until it has ended, stop it, or choose another output folder",
                    state=NOTHING_WRITTEN,
                ) from None
            finally:
                if fd != self._lock_fd:
                    os.close(fd)
        raise StoreError("the lock cannot be taken: other processes keep removing it", where=str(self.folder))

    def _recover(self) -> Entries:
        """Finish, or undo, a publish that was cut off between two steps; what the journal says of work to resume."""
        entries = read_journal(self.folder / "journal")
        old = self.folder / "old"
        if entries.published is not None and _identity(self.out) == entries.published:
            self._remove()  # it was published; what is left here is what it replaced
        elif entries.lines == 0 and not old.exists():
            self._remove()  # cut off before anything was finished, or at the end of being removed
        elif old.is_dir() and not self.out.exists():
            old.rename(self.out)
        elif old.is_dir():
            raise StoreError(
                f"an interrupted overwrite of {self.out} left the earlier checkpoint here, and a new folder has its name",
                where=str(old),
                fix="move one of the two away and run again",
            )
        return entries

    def _resumable(self, entries: Entries, resume: bool) -> bool:
        """True if the journal is of this very plan; raises CannotResume if it is of another."""
        if not resume:
            return False
        if entries.lines == 0 or not self._content.is_dir():
            return False  # cut off before the first line, or while being discarded: nothing to lose
        if (entries.plan, entries.layout) == (self.plan_hash, self._layout_hash()):
            return True
        same_plan = entries.plan == self.plan_hash
        raise CannotResume(
            "unfinished work of another plan is here"
            if not same_plan
            else "unfinished work of this plan is here, but its files are laid out otherwise (another version?)",
            where=str(self.folder),
            details=(
                f"there    plan {entries.plan or 'unreadable'}, layout {entries.layout or 'unreadable'}",
                f"wanted   plan {self.plan_hash}, layout {self._layout_hash()}",
                f"{len(entries.tensors):,} finished tensors would be lost",
            ),
            fix="run the earlier plan again to finish it, discard it with --no-resume (resume=False), "
            "or choose another output folder",
            state=f"Nothing was written. The unfinished work stays in {self.folder}",
        )

    def _layout_hash(self) -> str:
        return hash_bytes(b"".join(s.header for s in self.layout.shards) + (self.layout.index or b""))

    def _wipe(self) -> None:
        for entry in list(self.folder.iterdir()):
            if entry.name == "lock":
                continue
            if entry.is_dir() and not entry.is_symlink():
                disk.remove_tree(entry)
            else:
                entry.unlink()

    def _remove_other_files(self) -> None:
        """What an earlier run added beside the weights is added again by this one, or not at all."""
        weights = {shard.name for shard in self.layout.shards}
        for entry in list(self._content.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                disk.remove_tree(entry)
            elif entry.name not in weights or entry.is_symlink():
                entry.unlink()

    def _reserve(self) -> None:
        """Open all weight files at their full size and write their headers."""
        disk.allow_open_files(2 * len(self.layout.shards))
        for shard in self.layout.shards:
            self._weights.append(WeightFile(self._content / shard.name))
        for file in self._weights:  # after all that are needed: descriptors may run short
            file.open_direct()
        held = sum(os.fstat(file.fd).st_blocks * 512 for file in self._weights)
        needed = self.layout.total_bytes + _BOOKKEEPING_BYTES * len(self.layout.places) - held
        state = f"{NOTHING_WRITTEN[:-1]}; the space reserved so far is released."
        if held:
            state = f"Finished tensors are kept in {self.folder}; run again to go on."
        if needed > disk.available_bytes(self.folder):
            raise disk.no_space(self.out.parent, needed, state=state)
        try:
            for file, shard in zip(self._weights, self.layout.shards, strict=True):
                disk.reserve(file.fd, shard.nbytes)
                file.write(memoryview(shard.header), 0)
        except OSError as error:
            if error.errno in disk.FULL:
                raise disk.no_space(self.out.parent, needed, state=state, cause=error) from error
            raise

    def _recheck(self, recorded: Mapping[str, str], threads: int, progress: Progress | None) -> None:
        """Believe of the journal what the bytes on disk confirm; the other tensors are made again."""
        specs = {spec.name: spec for shard in self.layout.shards for spec in shard.tensors}
        stored = []
        for name in recorded:
            if name in specs:
                place = self.layout.places[name]
                stored.append(Stored(name, self._weights[place.shard].fd, place.offset, place.nbytes, grain_bytes(specs[name])))
        found = reread(stored, threads=threads, progress=progress) if stored else {}
        self._checksums = {name: checksum for name, checksum in found.items() if checksum == recorded[name]}

    # tensors

    @property
    def finished(self) -> frozenset[str]:
        """Names of the tensors that are done: by an earlier run, re-read and found right, or in this one. A snapshot."""
        with self._mutex:
            return frozenset(self._checksums)

    def location(self, name: str) -> tuple[int, int]:
        """Open file and byte offset of a tensor, for copy_file_range and the like. The file is closed by `close`."""
        self._check_open()
        place = self.layout.places[name]
        return self._weights[place.shard].fd, place.offset

    def write(self, name: str, start_byte: int, buffer: BytesLike) -> None:
        """Write a C-contiguous buffer at byte `start_byte` of a tensor. Thread-safe; see `WeightFile.write` for what is fast.

        Raises NoSpace; ValueError when the bytes would fall outside the tensor.
        """
        self._check_open()
        place = self.layout.places[name]
        view = byte_view(buffer)
        if start_byte < 0 or start_byte + view.nbytes > place.nbytes:
            raise ValueError(f"{name}: bytes {start_byte}..{start_byte + view.nbytes} of a tensor of {place.nbytes} bytes")
        try:
            self._weights[place.shard].write(view, place.offset + start_byte)
        except OSError as error:
            raise self._failed(error, f"tensor {name}") from error

    def finish(self, name: str, checksum: str) -> None:
        """Record that all bytes of a tensor are written. Thread-safe; in the journal before it returns.

        checksum  `checksum.combine` of its grain digests, 32 hex digits
        """
        journal = self._check_open()
        if name not in self.layout.places:
            raise KeyError(name)
        if not _CHECKSUM.fullmatch(checksum):
            raise ValueError(f"{name}: {checksum!r} is not a checksum of 32 hex digits")
        try:
            journal.tensor(name, checksum)
        except OSError as error:
            raise self._failed(error, f"journal, tensor {name}") from error
        with self._mutex:
            self._checksums[name] = checksum

    def _failed(self, error: OSError, where: str) -> StoreError:
        state = f"What is finished is kept in {self.folder}; run again to go on."
        if error.errno in disk.FULL:
            done = self.finished
            left = sum(place.nbytes for name, place in self.layout.places.items() if name not in done)
            return disk.no_space(self.out.parent, left, state=state, cause=error)
        return StoreError(f"writing failed: {error.strerror}", where=f"{self.folder}, {where}", state=state)

    def _check_open(self) -> Journal:
        if self._journal is None:
            raise ValueError(f"{self.folder}: this Staging is closed")
        return self._journal

    # other files

    def add_file(self, name: str, data: BytesLike | Path) -> None:
        """Add a file that is not a weight: its bytes, or a file to copy (links to it are followed).

        name  relative path with `/`; it cannot leave the folder, nor be a weight file, its index or the manifest
        """
        self._check_open()
        relative = check_file_name(name)
        if name in self._files:
            raise StoreError("the output has a file of this name already", where=name)
        try:
            source = data.open("rb") if isinstance(data, Path) else BytesIO(byte_view(data))
        except OSError as error:
            raise StoreError(f"cannot be read: {error.strerror}", where=str(data)) from error
        try:
            with source, os.fdopen(create_file(self._content, relative), "wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
            self._files[name] = hash_file(self._content / name)
        except OSError as error:
            raise self._failed(error, name) from error

    # the end

    def publish(self, manifest: Mapping[str, Any], *, fsync: bool = True) -> Path:
        """Check that all is there, write index and manifest, and give the folder its final name. Closes the Staging.

        manifest  JSON values to put in the manifest beside the store's own
        fsync     False leaves it to the system when the bytes reach the disk: quicker, and lost in a power cut

        Returns the final folder. Raises StoreError if a tensor is missing or a file is not what the layout says,
        OutputExists if the final name was taken meanwhile; what is staged then stays.
        """
        journal = self._check_open()
        check_vacant(self.out, overwrite=self._overwrite)
        self._check_complete()
        try:
            if self.layout.index is not None:
                self._files[INDEX_NAME] = self._write_own(INDEX_NAME, self.layout.index)
            self._write_own(
                MANIFEST_NAME,
                encode_manifest(self.layout, self.plan_hash, self._checksums, self._files, manifest),
            )
            self._check_names()
            if fsync:
                self._fsync()
            about = self._content.stat()
            journal.publish(about.st_dev, about.st_ino)
            self._rename()
        except OSError as error:
            raise self._failed(error, "publish") from error
        self._close_files()
        try:
            if fsync:
                disk.fsync_folder(self.out.parent)
            self._remove()
        except OSError as error:
            raise self._leftover(str(error.strerror)) from error
        except StoreError as error:
            raise self._leftover(str(error)) from error
        return self.out

    def _leftover(self, reason: str) -> StoreError:
        return StoreError(
            f"the output is published and complete, but clearing up failed: {reason}",
            where=str(self.out),
            fix=f"remove {self.folder} by hand",
        )

    def _check_complete(self) -> None:
        missing = [name for name in self.layout.places if name not in self._checksums]
        problems = [f"tensor {name} is not finished" for name in missing]
        for file, shard in zip(self._weights, self.layout.shards, strict=True):
            size = os.fstat(file.fd).st_size
            if size != shard.nbytes:
                problems.append(f"{shard.name} has {size:,} bytes, the layout {shard.nbytes:,}")
            header = bytearray(len(shard.header))
            disk.read_into(file.fd, memoryview(header), 0)
            if header != shard.header:
                problems.append(f"the header of {shard.name} was overwritten")
        if problems:
            raise StoreError(
                f"not published: {len(problems):,} problems",
                where=str(self.out),
                details=problems[:20],
                state=f"What is finished is kept in {self.folder}.",
            )

    def _write_own(self, name: str, data: bytes) -> OtherFile:
        fd = create_file(self._content, PurePosixPath(name))
        try:
            disk.write_all(fd, memoryview(data), 0)
        finally:
            os.close(fd)
        return OtherFile(len(data), hash_bytes(data))

    def _check_names(self) -> None:
        """Only what this Staging wrote may be published."""
        expected = {MANIFEST_NAME, *self._files, *(shard.name for shard in self.layout.shards)}
        found = set(list_files(self._content))
        if found != expected:
            raise StoreError(
                "not published: the staging folder was changed by someone else",
                where=str(self._content),
                details=[f"not ours: {n}" for n in sorted(found - expected)]
                + [f"missing: {n}" for n in sorted(expected - found)],
            )

    def _fsync(self) -> None:
        for file in self._weights:
            os.fdatasync(file.fd)
        folders = {self._content}
        for name in [*self._files, MANIFEST_NAME]:
            path = self._content / name
            folders |= {parent for parent in path.parents if parent.is_relative_to(self._content)}
            with path.open("rb") as other:
                os.fsync(other.fileno())
        for folder in sorted(folders):
            disk.fsync_folder(folder)

    def _rename(self) -> None:
        try:
            self._content.rename(self.out)  # fails if there is a folder with anything in it
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not self._overwrite:
                raise OutputExists(
                    "the output folder was made by someone else meanwhile",
                    where=str(self.out),
                    fix="move it away and run again: all that is left to do is the rename",
                    state=f"Everything is finished in {self.folder}",
                ) from None
        if disk.exchange(self._content, self.out):
            return
        old = self.folder / "old"
        self.out.rename(old)
        try:
            self._content.rename(self.out)
        except OSError:
            old.rename(self.out)
            raise

    def discard(self) -> None:
        """Remove the staging folder and all that is in it. The final folder is not touched."""
        if self._lock_fd < 0:
            raise ValueError(f"{self.folder}: this Staging is closed")
        self._close_files()
        self._remove()

    def _remove(self) -> None:
        """Remove the staging folder; the journal, which says what the rest is, goes after the rest."""
        try:
            disk.remove_tree(self._content)
            disk.remove_tree(self.folder / "old")
            self._wipe()
            (self.folder / "lock").unlink()
            self.folder.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # not empty: another process has just begun here
                raise
        finally:
            self._release_lock()

    def close(self) -> None:
        """Let go of files and lock; what is staged stays, and `Staging.open` goes on from it. May be called twice."""
        self._close_files()
        self._release_lock()

    def _close_files(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        while self._weights:
            self._weights.pop().close()

    def _release_lock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _flock(fd: int, path: Path) -> None:
    """Lock an open file, or raise BlockingIOError when another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        warnings.warn(  # some network file systems: better to work there than not
            f"{path}: this file system has no locks, so nothing stops a second process from building the same output",
            stacklevel=2,
        )


def hash_file(path: Path) -> OtherFile:
    """Size and xxh3_128 of a file, read in bounded pieces."""
    import xxhash

    hasher = xxhash.xxh3_128()
    nbytes = 0
    with path.open("rb") as file:
        while piece := file.read(_COPY_BYTES):
            hasher.update(piece)
            nbytes += len(piece)
    return OtherFile(nbytes, hasher.hexdigest())


def list_files(folder: Path) -> list[str]:
    """Relative names of everything in a folder that is not itself a folder; links to folders are not entered."""
    names = []
    for root, folders, files in os.walk(folder):
        here = Path(root)
        links = [name for name in folders if (here / name).is_symlink()]
        names += [(here / name).relative_to(folder).as_posix() for name in [*files, *links]]
    return sorted(names)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a published checkpoint, None when there is none."""
    try:
        about = path.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(about.st_mode) or not (path / MANIFEST_NAME).exists():
        return None
    return about.st_dev, about.st_ino
