"""The folder in which a checkpoint is built, beside its final name, until one rename publishes it.

    parent/
      out/                              the final name: nothing, or the checkpoint that will be replaced
      .out.weightsmith-staging/
        lock                            held (flock) by the process at work; holds its id
        space                           reserves the room of the files beside the weights, until they are added
        journal                         which tensors are finished, with checksums
        content/                        becomes out/
        products/                       what had to be computed before some tensors, one file each
        parts/                          locks and journals of processes that do a part of the plan each
        old/                            only where the file system cannot swap two names: the replaced checkpoint

Nothing half-made ever stands under the final name. Work that is interrupted at any point, power loss included, goes
on from the journal; what the journal says is compared with the bytes on disk first.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO, FileIO
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from weightsmith.containers import Layout
from weightsmith.containers.safetensors import INDEX_NAME
from weightsmith.errors import NOTHING_WRITTEN, Busy, CannotResume, Finding, NoSpace, OutputExists, StoreError, WeightsmithError
from weightsmith.formats.files import open_regular
from weightsmith.store import disk
from weightsmith.store.checksum import byte_view, grain_bytes, hash_bytes
from weightsmith.store.claim import (
    CONTENT,
    JOURNAL,
    LOCK,
    OLD,
    OWNER,
    PARTS,
    PRODUCTS,
    SPACE,
    check_content,
    check_kinds,
    check_made_by_us,
)
from weightsmith.store.journal import Distance, Entries, Journal, read_journal
from weightsmith.store.manifest import MANIFEST_NAME, OtherFile, encode_manifest
from weightsmith.store.products import Arrays, read_product, write_product
from weightsmith.store.reread import Progress, Stored, reread
from weightsmith.store.target import check_file_name, check_out, check_replaced, check_vacant, create_file
from weightsmith.store.weight_file import WeightFile
from weightsmith.tensors import TensorSpec

if TYPE_CHECKING:
    from weightsmith.plans import Product
    from weightsmith.store.checksum import BytesLike

ATTACH_SECONDS = 60
"""How long a process that does a part waits for another one to prepare the staging folder."""

_COPY_BYTES = 1 << 20
_BOOKKEEPING_BYTES = 400  # of journal and manifest, for each tensor
_CHECKSUM = re.compile("[0-9a-f]{32}")


STAGING_SUFFIX = ".weightsmith-staging"


def staging_folder(out: Path) -> Path:
    """The staging folder of an output folder: in the same parent, so that publishing is a rename."""
    return out.parent / f".{out.name}{STAGING_SUFFIX}"


def staged_plan(out: str | os.PathLike[str]) -> str:
    """The plan hash of interrupted work for this output folder, "" if there is none."""
    return read_journal(staging_folder(check_out(out)) / JOURNAL).plan


class Staging:
    """A checkpoint being built. Made by `Staging.open`; `publish` ends it well, `close` leaves a resumable state.

    out        the final folder
    folder     the staging folder, for messages
    layout     where every byte goes
    plan_hash  identity of the plan; only work of the same plan is resumed
    warnings   what the user should know

    `write`, `finish`, `location` and `finished` may be used from any thread, for different tensors or parts of one.
    As a context manager it is closed at the end, whatever happened; what was staged is kept.
    """

    def __init__(
        self,
        out: Path,
        layout: Layout,
        plan_hash: str,
        facts: Mapping[str, str],
        overwrite: bool,
        protected: Sequence[Path],
        other_bytes: int,
    ) -> None:
        """Use `Staging.open`."""
        self.out = out
        self.folder = staging_folder(out)
        self.layout = layout
        self.plan_hash = plan_hash
        self._facts = facts
        self._content = self.folder / CONTENT
        self.warnings: tuple[Finding, ...] = ()
        self._overwrite = overwrite
        self._protected = tuple(protected)
        self._other_bytes = other_bytes
        self._published = False
        self._lock: FileIO | None = None  # its close() may be called twice, and cut off by Ctrl-C
        self._weights: list[WeightFile] = []
        self._journal: Journal | None = None
        self._part_lock: FileIO | None = None
        self._checksums: dict[str, str] = {}
        self._distances: dict[str, Distance] = {}
        self._made_from: dict[str, str] = {}
        self._products: dict[str, str] = {}
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
        facts: Mapping[str, str] | None = None,
        resume: bool = True,
        overwrite: bool = False,
        protected: Sequence[Path] = (),
        other_bytes: int = 0,
        threads: int = 2,
        progress: Progress | None = None,
    ) -> Staging:
        """Make the staging folder, or take up the one of an interrupted run; reserve all space; write the headers.

        out        the final folder: new, empty, or (with `overwrite`) a checkpoint that `publish` will replace; folders on
                   the way to it are made, and stay whatever happens
        plan_hash  identity of the work: only work with the same one is resumed
        facts      what the plan was made from, each under the name that the user knows it by: what has changed is told by them
        resume     False discards what an earlier run left
        protected  every file and folder that the run reads: never replaced
        other_bytes  of the files that will be added beside the weights: their space is reserved
        threads, progress   of re-reading the finished tensors; progress(bytes done, bytes in all)

        Raises OutputExists, CannotResume (another plan's work is there), NoSpace, and StoreError for a folder that
        cannot be written or that another process is building. Nothing is written then, except that resumable work
        stays.
        """
        staging = cls(check_out(out), layout, plan_hash, facts or {}, overwrite, protected, other_bytes)
        with staging._preparing():
            staging._open(resume, None, threads, progress)
        return staging

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Close on any error; say what a failed call to the file system means."""
        try:
            yield
        except OSError as error:
            self.close()
            if error.errno in disk.FULL:
                raise disk.no_space(self.out.parent, self.layout.total_bytes, state=NOTHING_WRITTEN, cause=error) from error
            fix = "raise the limit: ulimit -n 65536" if error.errno in disk.TOO_MANY_FILES else "choose another output folder"
            raise StoreError(f"cannot be prepared: {error.strerror}", where=str(self.folder), fix=fix) from error
        except BaseException:
            self.close()
            raise

    def _open(self, resume: bool, names: Collection[str] | None, threads: int, progress: Progress | None) -> None:
        """See `open`. names: of the tensors that are taken over if they are finished; None: all."""
        entries = Entries()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(self.folder):
            entries = self._take_lock()
            self._recover(entries)
        self._check_vacant()
        if self._lock is None:
            entries = self._take_lock()  # another process may have come and gone meanwhile
        fresh = not self._resumable(entries, resume)
        if fresh:
            self._wipe()
        else:
            self._remove_other_files()
        try:
            self._journal = Journal(self.folder / JOURNAL)
            if fresh:
                self._journal.start(self.plan_hash, self._layout_hash(), self._facts)
                self._content.mkdir()
            self._reserve()
        except (NoSpace, OSError):
            if fresh:
                self.discard()
            raise
        if not fresh:
            self._take_over(entries, names, threads, progress)

    def _take_over(self, entries: Entries, names: Collection[str] | None, threads: int, progress: Progress | None) -> None:
        """Take over what is finished: the tensors of these names (None: all), and all products."""
        tensors = entries.tensors
        self._recheck(tensors if names is None else {n: tensors[n] for n in names if n in tensors}, threads, progress)
        self._distances = {name: entries.distances[name] for name in self._checksums if name in entries.distances}
        self._made_from = {name: entries.made_from.get(name, "") for name in self._checksums}
        self._products = dict(entries.products)

    @classmethod
    def attach(
        cls,
        out: str | os.PathLike[str],
        layout: Layout,
        plan_hash: str,
        part: tuple[int, int],
        names: Collection[str],
        *,
        facts: Mapping[str, str] | None = None,
        overwrite: bool = False,
        protected: Sequence[Path] = (),
        other_bytes: int = 0,
        threads: int = 2,
        progress: Progress | None = None,
    ) -> Staging:
        """Join the processes of this machine that build one output together; whoever is first prepares the staging folder.

        part   (k, n), k from 1. One process at a time does a part; it has a journal of its own
        names  the tensors of this part: they alone may be written

        A Staging made so cannot publish: `Staging.open` does, when no part is being done any more. Else as `open`, with which
        it resumes.
        """
        staging = cls(check_out(out), layout, plan_hash, facts or {}, overwrite, protected, other_bytes)
        with staging._preparing():
            staging._attach(part, names, threads, progress)
        return staging

    def _attach(self, part: tuple[int, int], names: Collection[str], threads: int, progress: Progress | None) -> None:
        deadline = time.monotonic() + ATTACH_SECONDS
        busy = Busy("other processes keep taking the unfinished work", where=str(self.out), fix="run again")
        while True:
            try:
                self._open(True, (), threads, None)  # nobody is here: prepare it, as a run of the whole plan would
                self.close()
            except Busy as error:
                busy = error
            if (found := self._share_lock()) is not None:
                entries = found
                break
            if time.monotonic() > deadline:
                raise busy
            time.sleep(0.05)
        if not self._resumable(entries, True):
            raise StoreError("another process has just removed the unfinished work", where=str(self.folder), fix="run again")
        label = f"{part[0]}-of-{part[1]}"
        folder = self.folder / PARTS
        folder.mkdir(exist_ok=True)
        lock = FileIO(disk.open_own(folder / f"lock-{label}", os.O_RDWR), "r+")
        self._part_lock = lock
        try:
            disk.lock(lock.fileno())
        except BlockingIOError:
            raise Busy(
                f"another process is doing part {part[0]} of {part[1]}",
                where=str(self.out),
                fix="wait until it has ended, or do another part",
                state="Nothing was written.",
            ) from None
        disk.allow_open_files(2 * len(self.layout.shards))
        self._weights = [WeightFile(self._content / shard.name) for shard in self.layout.shards]
        for file in self._weights:
            file.open_direct()
        self._take_over(self._with_parts(entries), names, threads, progress)
        self._journal = Journal(folder / f"journal-{label}")

    @contextmanager
    def only_process(self) -> Iterator[None]:
        """Wait until no other part is inside, and see the products that they have finished."""
        lock = FileIO(disk.open_own(self.folder / PARTS / "lock-products", os.O_RDWR), "r+")
        try:
            while True:
                try:
                    disk.lock(lock.fileno())
                    break
                except BlockingIOError:
                    time.sleep(0.1)
            self._products = self._with_parts(read_journal(self.folder / JOURNAL)).products
            yield
        finally:
            lock.close()

    def _share_lock(self) -> Entries | None:
        """Hold the lock together with other parts; what the journal says. None where it is held by a run of the whole plan."""
        try:
            lock = FileIO(os.open(self.folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "r+")
        except FileNotFoundError:
            return None
        try:
            if not disk.lock(lock.fileno(), shared=True):
                raise StoreError(
                    "this file system has no locks, which the processes that do parts need",
                    where=str(self.out.parent),
                    fix="run the plan in one process, without a part, or choose an output folder on another disk",
                )
            entries = read_journal(self.folder / JOURNAL)
            if (self.folder / LOCK).lstat().st_ino != os.fstat(lock.fileno()).st_ino or not entries.lines:
                return None
            self._lock = lock
            return entries
        except (FileNotFoundError, BlockingIOError):
            return None
        finally:
            if self._lock is not lock:
                lock.close()

    def _with_parts(self, entries: Entries) -> Entries:
        """What the journals of parts say too."""
        if (self.folder / PARTS).is_dir():
            for path in sorted((self.folder / PARTS).glob("journal-*")):
                entries.add(read_journal(path))
        return entries

    def _take_lock(self) -> Entries:
        """Hold `lock`, making the folder if need be; what the journal in it says. StoreError for a folder that is not ours.

        The loop is for a folder that its owner removes at this moment.
        """
        path = self.folder / LOCK
        for _ in range(100):
            try:
                self.folder.mkdir()
            except FileExistsError:
                check_kinds(self.folder)
            try:
                lock = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "r+")
            except FileNotFoundError:
                continue
            try:
                locked = disk.lock(lock.fileno())
                about = os.fstat(lock.fileno())
                if path.lstat().st_ino != about.st_ino:
                    continue
                owner, entries = _text(lock), read_journal(self.folder / JOURNAL)
                check_made_by_us(self.folder, owner, entries)
                self._with_parts(entries)
                if about.st_nlink > 1:  # left to its other names
                    path.unlink()
                    continue
                os.ftruncate(lock.fileno(), 0)
                os.pwrite(lock.fileno(), f"{OWNER}{os.getpid()} on {socket.gethostname()}".encode(), 0)
                self._lock = lock
                if not locked:
                    what = "this file system has no locks, so nothing stops a second process from building the same output"
                    self.warnings = (Finding(what, str(path)),)
                return entries
            except FileNotFoundError:
                pass
            except BlockingIOError:
                raise Busy(
                    f"{_text(lock) or 'another process'} is building this output now",
                    where=str(self.out),
                    fix="wait until it has ended, stop it, or choose another output folder",
                    state=NOTHING_WRITTEN,
                ) from None
            finally:
                if self._lock is not lock:
                    lock.close()
        raise StoreError("the lock cannot be taken: other processes keep removing it", where=str(self.folder))

    def recover(self) -> None:
        """Take the lock, and finish or undo a publish that was cut off. The folder may be gone then: see `is_open`."""
        self._recover(self._take_lock())

    def _recover(self, entries: Entries) -> None:
        """Finish, or undo, a publish that was cut off between two steps."""
        old = self.folder / OLD
        if entries.published is not None and _identity(self.out) == entries.published:
            self._check_replaced()
            self._remove()  # it was published; what is left here is what it replaced
        elif entries.lines == 0:
            self._remove()  # cut off before anything was finished, or at the end of being removed
        elif entries.published is not None and self._content.is_dir() and not _is_inode(self._content, entries.published[1]):
            raise StoreError(
                f"an interrupted overwrite of {self.out} left the checkpoint here that it replaced, and the new one does not "
                "have its name any more",
                where=str(self._content),
                fix=f"move that checkpoint to where it belongs, or remove {self.folder}, and run again",
                state=NOTHING_WRITTEN,
            )
        elif old.is_dir() and not self.out.exists():
            old.rename(self.out)
        elif old.is_dir():
            raise StoreError(
                f"an interrupted overwrite of {self.out} left the earlier checkpoint here, and a new folder has its name",
                where=str(old),
                fix="move one of the two away and run again",
            )

    def _resumable(self, entries: Entries, resume: bool) -> bool:
        """True if the journal is of this very plan; raises CannotResume if it is of another that has finished something."""
        if not resume:
            return False
        if entries.lines == 0 or not self._content.is_dir():
            return False  # cut off before the first line, or while being discarded: nothing to lose
        if (entries.plan, entries.layout) == (self.plan_hash, self._layout_hash()):
            return True
        if not (entries.tensors or entries.products):
            return False  # nothing to lose
        details: list[str] = []
        if not entries.plan:
            what = "unfinished work is here, but the first line of its journal is unreadable"
        elif entries.plan == self.plan_hash:
            what = "unfinished work of this plan is here, but its files are laid out otherwise (another version?)"
        else:
            what = "the unfinished work here does not match this run"
            details = changes(entries.facts, self._facts) if entries.facts else []
        lost = f"{len(entries.tensors):,} of {len(self.layout.places):,} tensors" if entries.tensors else "a computed product"
        raise CannotResume(
            what,
            where=str(self.folder),
            details=(*details, f"discarding it would lose: {lost}"),
            fix="undo the change and run again to resume, discard the work with --no-resume (resume=False), "
            "or choose another output folder",
            state=f"Nothing was written. The unfinished work stays in {self.folder}",
        )

    def _layout_hash(self) -> str:
        return hash_bytes(b"".join(s.header for s in self.layout.shards) + (self.layout.index or b""))

    def _wipe(self) -> None:
        """Remove all that is ours but the lock; the journal, which says whose the rest is, goes after the rest."""
        for name in (CONTENT, OLD):
            disk.remove_tree(self.folder / name, last=MANIFEST_NAME)  # which says that the rest of a replaced one is ours
        for name in (PRODUCTS, PARTS):
            disk.remove_tree(self.folder / name)
        (self.folder / SPACE).unlink(missing_ok=True)
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def _check_replaced(self) -> None:
        for name in (CONTENT, OLD):
            check_replaced(self.folder / name)

    def _remove_other_files(self) -> None:
        """What an earlier run added beside the weights is added again by this one, or not at all."""
        check_content(self._content)
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
        space = disk.open_own(self.folder / SPACE, os.O_RDWR)
        try:
            self._reserve_all(space)
        finally:
            os.close(space)

    def _reserve_all(self, space: int) -> None:
        """space: the open file that reserves the room of the files beside the weights."""
        held = sum(os.fstat(fd).st_blocks * 512 for fd in (space, *(file.fd for file in self._weights)))
        needed = self.layout.total_bytes + self._bookkeeping_bytes + self._other_bytes - held
        state = f"{NOTHING_WRITTEN[:-1]}; the space reserved so far is released."
        if held:
            state = f"Finished tensors are kept in {self.folder}; run again to go on."
        if needed > disk.available_bytes(self.folder):
            raise disk.no_space(self.out.parent, needed, state=state)
        try:
            for file, shard in zip(self._weights, self.layout.shards, strict=True):
                disk.reserve(file.fd, shard.nbytes)
                file.write(memoryview(shard.header), 0)
            disk.reserve(space, self._other_bytes)
        except OSError as error:
            if error.errno in disk.FULL:
                raise disk.no_space(self.out.parent, needed, state=state, cause=error) from error
            raise

    @property
    def _bookkeeping_bytes(self) -> int:
        return _BOOKKEEPING_BYTES * len(self.layout.places)

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

    @property
    def distances(self) -> dict[str, Distance]:
        """Of finished tensors that have a base: squared norms of what they have moved from it, and of the base. A snapshot."""
        with self._mutex:
            return dict(self._distances)

    def made_from(self, name: str) -> str:
        """Digest of the products that a finished tensor was made from; "" when there are none."""
        with self._mutex:
            return self._made_from.get(name, "")

    def product(self, name: str, outs: Sequence[TensorSpec]) -> Arrays | None:
        """The arrays of a product that an earlier run or another process finished; None if it is not there."""
        checksum = self._products.get(name)
        return None if checksum is None else read_product(self.folder / PRODUCTS, name, outs, checksum)

    def keep(self, product: Product, arrays: Arrays) -> None:
        """Keep the arrays of a finished product for a run that resumes this one. Thread-safe."""
        journal = self._check_open()
        checksum = write_product(self.folder / PRODUCTS, product.name, arrays)
        if checksum:
            try:
                journal.product(product.name, checksum)
            except OSError as error:
                raise self._failed(error, f"journal, product {product.name}") from error
            with self._mutex:
                self._products[product.name] = checksum

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

    def finish(self, name: str, checksum: str, distance: Distance | None = None, made_from: str = "") -> None:
        """Record that all bytes of a tensor are written. Thread-safe; in the journal before it returns.

        checksum  `checksum.combine` of its grain digests, 32 hex digits
        distance  squared norms of what it has moved from its base, and of the base
        made_from digest of the products that it was made from
        """
        journal = self._check_open()
        if name not in self.layout.places:
            raise KeyError(name)
        if not _CHECKSUM.fullmatch(checksum):
            raise ValueError(f"{name}: {checksum!r} is not a checksum of 32 hex digits")
        try:
            journal.tensor(name, checksum, distance, made_from)
        except OSError as error:
            raise self._failed(error, f"journal, tensor {name}") from error
        with self._mutex:
            self._checksums[name], self._made_from[name] = checksum, made_from
            if distance is not None:
                self._distances[name] = distance

    def _failed(self, error: OSError, where: str, more_bytes: int = 0) -> StoreError:
        """The error for a write that failed; more_bytes: what was to be written, beside the tensors that are not finished."""
        if error.errno in disk.FULL:
            done = self.finished
            left = sum(place.nbytes for name, place in self.layout.places.items() if name not in done)
            return disk.no_space(self.out.parent, left + more_bytes, state=self._kept, cause=error)
        return StoreError(f"writing failed: {error.strerror}", where=f"{self.folder}, {where}", state=self._kept)

    @property
    def _kept(self) -> str:
        return f"What is finished is kept in {self.folder}; run again to go on."

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
        (self.folder / SPACE).unlink(missing_ok=True)
        source = self._source(data) if isinstance(data, Path) else BytesIO(byte_view(data))
        with source:
            nbytes = source.seek(0, os.SEEK_END)
            source.seek(0)
            try:
                with os.fdopen(create_file(self._content, relative), "wb") as target:
                    while piece := self._read(source, str(data) if isinstance(data, Path) else name):
                        target.write(piece)
                self._files[name] = hash_file(self._content / name)
            except OSError as error:
                raise self._failed(error, name, nbytes) from error

    def _source(self, path: Path) -> FileIO:
        try:
            return open_regular(path)
        except WeightsmithError as error:
            what = error.finding.what
            reason = what if what.startswith("cannot be read") else f"cannot be read: {what}"
            raise StoreError(reason, where=str(path), fix=error.finding.fix, state=self._kept) from error

    def _read(self, source: FileIO | BytesIO, where: str) -> bytes | None:
        """The next bytes of a file that is copied. Raises StoreError: it is no failure to write."""
        try:
            return source.read(_COPY_BYTES)
        except OSError as error:
            raise StoreError(f"cannot be read: {error.strerror}", where=where, state=self._kept) from error

    # the end

    def publish(self, manifest: Mapping[str, Any], *, fsync: bool = True) -> Path:
        """Check that all is there, write index and manifest, and give the folder its final name. Closes the Staging.

        manifest  JSON values to put in the manifest beside the store's own
        fsync     False leaves it to the system when the bytes reach the disk: quicker, and lost in a power cut

        Returns the final folder. Raises StoreError if a tensor is missing or a file is not what the layout says,
        OutputExists if the final name was taken meanwhile; what is staged then stays.
        """
        journal = self._check_open()
        if self._part_lock is not None:
            raise ValueError(f"{self.folder}: a part cannot publish the whole")
        self._check_vacant(state=f"Everything is finished in {self.folder}")
        self._check_complete()
        try:
            (self.folder / SPACE).unlink(missing_ok=True)
            if self.layout.index is not None:
                self._files[INDEX_NAME] = self._write_own(INDEX_NAME, self.layout.index)
            self._write_own(
                MANIFEST_NAME,
                encode_manifest(self.layout, self.plan_hash, self._checksums, self._files, manifest),
            )
            self._check_names()
            if fsync:
                self._fsync()
            self._check_vacant(state=f"Everything is finished in {self.folder}")  # syncing may have taken minutes
            about = self._content.stat()
            journal.publish(about.st_dev, about.st_ino)
            self._rename()
            self._published = True
        except OSError as error:
            own_bytes = self._bookkeeping_bytes + len(self.layout.index or b"")
            raise self._failed(error, "publish", own_bytes) from error
        self._close_files()
        try:
            if fsync:
                disk.fsync_folder(self.out.parent)
            self._check_replaced()
            self._remove()
        except OSError as error:
            raise self._leftover(str(error.strerror)) from error
        except StoreError as error:
            raise self._leftover(error.finding.what) from error
        return self.out

    def _check_vacant(self, state: str = NOTHING_WRITTEN) -> None:
        try:
            check_vacant(self.out, overwrite=self._overwrite, protected=self._protected)
        except StoreError as error:
            error.state = state
            raise

    def _leftover(self, reason: str) -> StoreError:
        self._release_lock()
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
            disk.sync_data(file.fd)
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
        old = self.folder / OLD
        self.out.rename(old)
        try:
            self._content.rename(self.out)
        except OSError:
            old.rename(self.out)
            raise

    @property
    def is_open(self) -> bool:
        """The lock is held: it is neither published nor closed nor discarded."""
        return self._lock is not None

    def discard(self) -> None:
        """Remove the staging folder and all that is in it. The final folder is not touched."""
        if self._lock is None:
            raise ValueError(f"{self.folder}: this Staging is closed")
        self._close_files()
        if self._published:
            self._check_replaced()
        self._remove()

    def _remove(self) -> None:
        """Remove the staging folder, and leave one that holds what is not ours."""
        try:
            self._wipe()
            (self.folder / LOCK).unlink()
            self.folder.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # not empty: another process has just begun here, or a note of the user's
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
        for lock in (self._part_lock, self._lock):
            if lock is not None:
                lock.close()
        self._lock = self._part_lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two sets of facts, the first 20 of them.

    >>> changes({"parameters.t": "0.3", "files of ./b": "#51f0"}, {"parameters.t": "0.4", "files of ./b": "#77aa", "seed": "1"})
    ['parameters.t: 0.3 -> 0.4', 'files of ./b: changed', 'seed: not set -> 1']
    """
    found = []
    for term in dict.fromkeys([*before, *now]):
        old, new = before.get(term, "not set"), now.get(term, "not set")
        if old != new:
            opaque = old.startswith("#") and new.startswith("#")
            found.append(f"{term}: changed" if opaque else f"{term}: {_short(old)} -> {_short(new)}")
    found = found or ["other details of the plan: comments in the recipe, or an option"]
    return [*found[:20], *([f"and {len(found) - 20:,} more"] if len(found) > 20 else [])]


def _short(value: str) -> str:
    if value.startswith("#"):
        return "other"
    return value if len(value) <= 60 else f"{value[:57]}..."


def _text(lock: FileIO) -> str:
    text = bytearray(300)
    return text[: disk.read_into(lock.fileno(), memoryview(text), 0)].decode(errors="replace")


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


def _is_inode(path: Path, inode: int) -> bool:
    # Not the device: after a reboot the same disk may have another number.
    return path.lstat().st_ino == inode


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a published checkpoint, None when there is none."""
    try:
        about = path.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(about.st_mode) or not (path / MANIFEST_NAME).exists():
        return None
    return about.st_dev, about.st_ino
