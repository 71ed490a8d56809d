"""A checkpoint being built: tensors, products and other files go in, `publish` gives it its final name.

Work interrupted at any point, even by power loss, is resumed from the journal. Its checksums are compared with the bytes
on disk first.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from weightsmith.containers import Layout
from weightsmith.containers.safetensors import INDEX_NAME
from weightsmith.errors import NOTHING_WRITTEN, Busy, Finding, NoSpace, StoreError
from weightsmith.formats.files import FULL
from weightsmith.outputs.checksum import byte_view
from weightsmith.outputs.journal import Built, Entries, Finished, Journal, read_journal
from weightsmith.outputs.local import disk
from weightsmith.outputs.local.area import StagingArea, left_behind, staging_folder
from weightsmith.outputs.local.claim import JOURNAL, PARTS, PRODUCTS, SPACE
from weightsmith.outputs.local.followed import Followed
from weightsmith.outputs.local.locks import part_journals, read_journals
from weightsmith.outputs.local.other_files import OtherFiles
from weightsmith.outputs.local.products import Arrays, create_product, read_product, remove_parts, remove_product, write_product
from weightsmith.outputs.local.target import check_out, check_vacant
from weightsmith.outputs.local.weights import WeightFiles, Weights
from weightsmith.outputs.manifest import MANIFEST_NAME, encode_manifest
from weightsmith.outputs.reread import Progress
from weightsmith.outputs.resume import is_resumable, layout_hash

if TYPE_CHECKING:
    from weightsmith.formats.files import Extent
    from weightsmith.outputs.checksum import BytesLike
    from weightsmith.plans import Product

ATTACH_SECONDS = 60
"""How long a process that builds a part waits for another one to prepare the staging folder."""

_BOOKKEEPING_BYTES = 400  # of journal and manifest, for each tensor
_CHECKSUM = re.compile("[0-9a-f]{32}")


MakeWeights = Callable[[Path, Layout, Entries], WeightFiles]


def _all_weights(content: Path, layout: Layout, _: Entries) -> Weights:
    return Weights(content, layout)


def staged_plan(out: str | os.PathLike[str]) -> str:
    """The plan hash of interrupted work for this output folder, "" if there is none."""
    return read_journal(staging_folder(check_out(out)) / JOURNAL).plan


class Staging:
    """A checkpoint being built. Created by `Staging.open`, completed by `publish`; `close` leaves work that can be resumed.

    out        the final folder
    folder     the staging folder, for messages
    layout     where every byte goes
    plan_hash  identity of the plan; only work of the same plan is resumed
    warnings   what the user should know

    `write`, `finish`, `location` and `finished` may be used from any thread, for different tensors or parts of one.
    As a context manager it is closed at the end in any case; staged work is not removed.
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
        self.layout = layout
        self.plan_hash = plan_hash
        self._area = StagingArea(out)
        self.folder, self._content, self._locks = self._area.folder, self._area.content, self._area.locks
        self._facts = facts
        self._overwrite = overwrite
        self._protected = tuple(protected)
        self._other_bytes = other_bytes
        self._make_weights: MakeWeights = _all_weights
        self._part = ""
        self._published = False
        self._left: tuple[Finding, ...] = ()
        self._journal: Journal | None = None
        self._weights: WeightFiles | None = None
        self._tensors: dict[str, Finished] = {}
        self._products: dict[str, str] = {}
        self._held = False
        self._notes: dict[str, Any] = {}
        self._files = OtherFiles(self._content)
        self._mutex = threading.Lock()

    # opening

    @classmethod
    def open(
        cls,
        out: str | os.PathLike[str],
        layout: Layout,
        plan_hash: str,
        *,
        part: str = "",
        names: Collection[str] | None = None,
        helping: bool = False,
        facts: Mapping[str, str] | None = None,
        resume: bool = True,
        overwrite: bool = False,
        protected: Sequence[Path] = (),
        other_bytes: int = 0,
        threads: int = 2,
        progress: Progress | None = None,
        weights: MakeWeights | None = None,
    ) -> Staging:
        """Create the staging folder, or resume an interrupted run; reserve all space; write the headers.

        out        the final folder: new, empty, or (with `overwrite`) a checkpoint that `publish` will replace. Missing parent
                   folders are created, and never removed
        plan_hash  identity of the work: only work with the same one is resumed
        part       label (`label`): build one part together with other processes; the first one prepares the folder. Each part
                   has a lock and a journal of its own. A part cannot publish, and always resumes; "": build everything
        names      the tensors of the part; no others may be written
        helping    the part is built for a process that is in `shared`: the folder is not prepared, even if its lock seems free
        facts      what the plan was made from, by the user's names for it, to tell the user what has changed
        resume     False discards what an earlier run left
        protected  every file and folder that the run reads: never replaced
        other_bytes  of the files that are not weights: their space is reserved
        threads, progress   for verifying the finished tensors; progress(bytes done, bytes in all)
        weights    makes the weight files, of the content folder, the layout and the journal; None: all are kept until the end

        Raises OutputExists, CannotResume (for work of another plan), NoSpace, Busy, and StoreError for a folder that cannot be
        written, or if the process that is helped is not seen. Nothing is written then, and resumable work stays.
        """
        staging = cls(check_out(out), layout, plan_hash, facts or {}, overwrite, protected, other_bytes)
        staging._make_weights = weights or _all_weights
        with staging._preparing():
            if not part:
                staging._open(resume, names, threads, progress)
            else:
                staging._join(part, names, helping, threads, progress)
        return staging

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Close on any error; say what a failed call to the file system means."""
        try:
            yield
        except OSError as error:
            self.close()
            if error.errno in FULL:
                raise disk.no_space(self.out.parent, self.layout.total_bytes, state=NOTHING_WRITTEN, cause=error) from error
            fix = "raise the limit: ulimit -n 65536" if error.errno in disk.TOO_MANY_FILES else "choose another output folder"
            raise StoreError(f"cannot be prepared: {error.strerror}", where=str(self.folder), fix=fix) from error
        except BaseException:
            self.close()
            raise

    def _open(self, resume: bool, names: Collection[str] | None, threads: int, progress: Progress | None) -> None:
        """Take the folder for this process alone. names: of the tensors to take over if they are finished; None: all."""
        entries = Entries()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(self.folder):
            entries = self._locks.take()
            self._area.recover(entries)
        self._check_vacant()
        if not self._locks.held:
            entries = self._locks.take()  # another process may have come and gone meanwhile
        fresh = not (resume and self._is_resumable(entries))
        if fresh:
            self._area.empty()
        else:
            self._area.remove_other_files({shard.name for shard in self.layout.shards})
            remove_parts(self.folder / PRODUCTS)
        try:
            self._journal = Journal(self.folder / JOURNAL)
            if fresh:
                self._journal.start(self.plan_hash, layout_hash(self.layout), self._facts)
                self._content.mkdir()
            for path in part_journals(self.folder):  # lines of this run are newer
                self._journal.absorb(path)
            self._notes = {} if fresh else entries.notes
            self._weights = self._make_weights(self._content, self.layout, Entries() if fresh else entries)
            space = disk.open_own(self.folder / SPACE, os.O_RDWR)
            try:
                self._weights.reserve(space, self._other_bytes, self._bookkeeping_bytes, self.folder)
            finally:
                os.close(space)
        except (NoSpace, OSError):
            if fresh:
                self.discard()
            raise
        if not fresh:
            self._take_over(entries, names, threads, progress)

    def _join(self, part: str, names: Collection[str] | None, helping: bool, threads: int, progress: Progress | None) -> None:
        """Build a part: prepare the folder if no process is in it, unless it is helping one; then share it."""
        deadline = time.monotonic() + ATTACH_SECONDS
        busy = Busy("other processes keep taking the unfinished work", where=str(self.out), fix="run again")
        while True:
            try:
                if not helping:
                    self._open(True, (), threads, None)
                    self.close()
            except Busy as error:
                busy = error
            if (entries := self._locks.share()) is not None or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if helping:
            self._locks.check_led()
        if entries is None:
            raise busy
        if (entries.plan, entries.layout) != (self.plan_hash, layout_hash(self.layout)):
            entries = read_journals(self.folder)  # for the message
        if not self._is_resumable(entries):
            raise StoreError("another process has just removed the unfinished work", where=str(self.folder), fix="run again")
        self._part = part
        self._locks.take_part(part)
        self._weights = Weights(self._content, self.layout)
        self._journal = Journal(self.folder / PARTS / f"journal-{part}")
        self._take_over(read_journals(self.folder, names), names, threads, progress)

    def _is_resumable(self, entries: Entries) -> bool:
        """See `is_resumable`; False also for work cut off before its first line, or while it was being discarded."""
        if entries.lines == 0 or not self._content.is_dir():
            return False
        return is_resumable(entries, self.plan_hash, self.layout, self._facts, self.folder)

    def _take_over(self, entries: Entries, names: Collection[str] | None, threads: int, progress: Progress | None) -> None:
        """Take over all finished products, and the finished tensors (None: all) whose bytes on disk have the right checksum."""
        self._tensors = {name: done for name, done in entries.tensors.items() if names is None or name in names}
        self._products = dict(entries.products)
        self._held = bool(entries.tensors or entries.products)
        self.reread(self._tensors, threads, progress)

    def reread(self, names: Collection[str], threads: int, progress: Progress | None = None) -> None:
        """Of these finished tensors, keep those whose bytes on disk have the right checksum."""
        checksums = self._opened()[1].checksums(names, threads, progress)
        for name in list(names):
            if checksums.get(name) != self._tensors[name].checksum:
                del self._tensors[name]

    @contextmanager
    def only_process(self, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Wait until no other part is inside, and see the products that they have finished. waiting: called if one is."""
        with self._locks.products(waiting):
            self._products = read_journals(self.folder, ()).products
            yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let other processes build parts meanwhile; `adopt` what they have finished.

        Raises Busy if one of them, or another run, is still there at the end.
        """
        content = self._content.stat().st_ino
        with ExitStack() as leading:
            try:
                self._opened()[1].sync()  # or this machine may write a page of a header later, over a tensor of another machine
                leading.enter_context(self._locks.lead(ATTACH_SECONDS))
            except OSError as error:
                raise self._failed(error, "headers and locks") from error
            self._locks.let_in()
            yield
        self._locks.take_back(ATTACH_SECONDS)
        if not self._content.is_dir() or self._content.stat().st_ino != content:
            raise Busy("another run has taken the unfinished work", where=str(self.out), fix="run again")

    def hand_over(self) -> Built:
        """What this process, which builds a part, has finished."""
        return Built(self.records, self.products, {})

    def adopt(self, built: Built) -> None:
        """Take over what a process that built a part has finished; it is in the journal of the part.

        The bytes of the tensors are not read again: see `reread`.
        """
        with self._mutex:
            self._tensors |= built.tensors
            self._products |= built.products

    def followed(self) -> Followed:
        """What other processes finish while they build parts."""
        return Followed(self.folder)

    def redo(self, names: Collection[str]) -> bool:
        """These finished tensors are computed again, which may be written over: no other is computed again with them."""
        return False

    def _check_vacant(self, state: str = NOTHING_WRITTEN) -> None:
        try:
            check_vacant(self.out, overwrite=self._overwrite, protected=self._protected)
        except StoreError as error:
            error.state = state
            raise

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What the user should know."""
        return self._locks.warnings + self._left

    @property
    def _bookkeeping_bytes(self) -> int:
        return _BOOKKEEPING_BYTES * len(self.layout.places)

    # tensors

    @property
    def finished(self) -> frozenset[str]:
        """Names of the finished tensors: of an earlier run, with the right checksum on disk, or of this one. A snapshot."""
        with self._mutex:
            return frozenset(self._tensors)

    @property
    def records(self) -> dict[str, Finished]:
        """The finished tensors by name. A snapshot."""
        with self._mutex:
            return dict(self._tensors)

    @property
    def products(self) -> dict[str, str]:
        """The checksums of the finished products by name. A snapshot."""
        with self._mutex:
            return dict(self._products)

    @property
    def holds_work(self) -> bool:
        """The journals named a finished tensor or product when this was opened."""
        return self._held

    def product(self, product: Product) -> Arrays | None:
        """The arrays of a product that an earlier run or another process finished; None if there are none."""
        checksum = self._products.get(product.name)
        return None if checksum is None else read_product(self.folder / PRODUCTS, product.name, product.outs, checksum)

    def create(self, product: Product) -> Arrays | None:
        """Arrays in a file for a product that is being computed, for `keep`; None if the disk cannot take them."""
        self._opened()
        return create_product(self.folder / PRODUCTS, product.name, product.outs)

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """Store the arrays of a finished product, for a run that resumes this one. Thread-safe.

        Returns them, mapped from their file if the disk could take them.
        """
        journal, _ = self._opened()
        checksum = write_product(self.folder / PRODUCTS, product.name, arrays)
        if not checksum:
            return arrays
        try:
            journal.product(product.name, checksum)
        except OSError as error:
            raise self._failed(error, f"journal, product {product.name}") from error
        with self._mutex:
            self._products[product.name] = checksum
        return self.product(product) or arrays

    def forget(self, product: Product) -> None:
        """Remove a product that nothing needs any more."""
        remove_product(self.folder / PRODUCTS, product.name)
        with self._mutex:
            self._products.pop(product.name, None)

    @property
    def notes(self) -> Mapping[str, Any]:
        """What an earlier run has noted: JSON values by key."""
        return self._notes

    def note(self, key: str, value: object) -> None:
        """Record a JSON value for a run that resumes this one. Thread-safe; on the disk before it returns."""
        journal, _ = self._opened()
        try:
            journal.note(key, value)
        except OSError as error:
            raise self._failed(error, "journal") from error

    def location(self, name: str) -> tuple[int, int] | None:
        """Open file and byte offset of a tensor, for copy_file_range and the like. The file is closed by `close`."""
        return self._opened()[1].location(name)

    def write(self, name: str, start_byte: int, buffer: BytesLike) -> None:
        """Write a C-contiguous buffer at byte `start_byte` of a tensor. Thread-safe; see `WeightFile.write` for what is fast.

        Raises NoSpace; ValueError when the bytes would fall outside the tensor.
        """
        _, weights = self._opened()
        try:
            weights.write(name, start_byte, byte_view(buffer))
        except OSError as error:
            raise self._failed(error, f"tensor {name}") from error

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """Does nothing: a local folder cannot copy from a remote file."""

    def finish(self, name: str, done: Finished) -> None:
        """Record that all bytes of a tensor are written. Thread-safe; in the journal before it returns."""
        journal, _ = self._opened()
        if name not in self.layout.places:
            raise KeyError(name)
        if not _CHECKSUM.fullmatch(done.checksum):
            raise ValueError(f"{name}: {done.checksum!r} is not a checksum of 32 hex digits")
        try:
            journal.tensor(name, done)
        except OSError as error:
            raise self._failed(error, f"journal, tensor {name}") from error
        with self._mutex:
            self._tensors[name] = done

    def _failed(self, error: OSError, where: str, more_bytes: int = 0) -> StoreError:
        """The error for a failed write. more_bytes: needed in addition to the unfinished tensors."""
        if error.errno in FULL:
            done = self.finished
            left = sum(place.nbytes for name, place in self.layout.places.items() if name not in done)
            return disk.no_space(self.out.parent, left + more_bytes, state=self._kept, cause=error)
        what, fix = f"writing failed: {error.strerror}", "check the disk and its permissions, and run again"
        return StoreError(what, where=f"{self.folder}, {where}", fix=fix, state=self._kept)

    @property
    def _kept(self) -> str:
        return f"Finished tensors are kept in {self.folder}; run again to resume."

    def _opened(self) -> tuple[Journal, WeightFiles]:
        if self._journal is None or self._weights is None:
            raise ValueError(f"{self.folder}: this Staging is closed")
        return self._journal, self._weights

    # other files

    def add_file(self, name: str, data: BytesLike | Path) -> None:
        """Add a file that is not a weight: its bytes, or a file to copy (links to it are followed).

        name  relative path with `/`; it cannot leave the folder, nor be a weight file, its index or the manifest
        """
        self._opened()
        (self.folder / SPACE).unlink(missing_ok=True)
        try:
            self._files.add(name, data, self._kept)
        except OSError as error:
            nbytes = data.stat().st_size if isinstance(data, Path) else byte_view(data).nbytes
            raise self._failed(error, name, nbytes) from error

    # the end

    def publish(self, manifest: Mapping[str, Any], *, fsync: bool = True) -> Path:
        """Check the output, write index and manifest, and give the folder its final name. Closes the Staging.

        manifest  further JSON values for the manifest
        fsync     False does not wait until the bytes are on the disk: faster, but they may be lost in a power cut

        Returns the final folder. Raises StoreError if a tensor is missing or a file does not match the layout, OutputExists
        if the final name was taken meanwhile; the staged work then stays. Once it is published nothing is raised: what cannot
        be cleaned up is in `warnings`.
        """
        journal, weights = self._opened()
        state = f"Everything is finished in {self.folder}"
        self._check_vacant(state)
        self.complete(manifest)
        try:
            if fsync:
                weights.sync()
                self._files.sync()
            self._check_vacant(state)  # syncing may have taken minutes
            about = self._content.stat()
            journal.publish(about.st_dev, about.st_ino)
            self._area.rename(overwrite=self._overwrite)
            self._published = True
        except OSError as error:
            raise self._failed(error, "publish") from error
        self._close_files()
        try:
            if fsync:
                disk.fsync_folder(self.out.parent)
            self._area.remove_replaced()
            self._area.remove()
        except (OSError, StoreError) as error:
            self._left = (left_behind(error, self.folder),)
            self._locks.close()
        return self.out

    def complete(self, manifest: Mapping[str, Any]) -> Path:
        """Check the output, and write index and manifest: the folder of its files, without a final name.

        Raises StoreError if a tensor is missing or a file does not match the layout; the staged work then stays.
        """
        _, weights = self._opened()
        if self._part:
            raise ValueError(f"{self.folder}: a part cannot publish the whole")
        self._check_complete(weights)
        try:
            (self.folder / SPACE).unlink(missing_ok=True)
            if self.layout.index is not None:
                self._files.records[INDEX_NAME] = self._files.write(INDEX_NAME, self.layout.index)
            records = encode_manifest(self.layout, self.plan_hash, self._tensors, self._files.records, manifest)
            self._files.write(MANIFEST_NAME, records)
            self._files.check_names(weights.names)
        except OSError as error:
            own_bytes = self._bookkeeping_bytes + len(self.layout.index or b"")
            raise self._failed(error, "publish", own_bytes) from error
        return self._content

    def _check_complete(self, weights: WeightFiles) -> None:
        problems = [f"tensor {name} is not finished" for name in self.layout.places if name not in self._tensors]
        problems += weights.problems()
        if problems:
            raise StoreError(
                f"not published: {len(problems):,} problems",
                where=str(self.out),
                details=problems[:20],
                state=f"Finished tensors are kept in {self.folder}.",
            )

    @property
    def is_open(self) -> bool:
        """False once it is published, closed or discarded."""
        return self._locks.held

    def discard(self) -> None:
        """Remove the staging folder. The final folder is not touched."""
        if not self.is_open:
            raise ValueError(f"{self.folder}: this Staging is closed")
        self._close_files()
        if self._published:
            self._area.remove_replaced()
        self._area.remove()

    def close(self) -> None:
        """Close the files and release the locks; staged work stays, and `Staging.open` resumes it. May be called twice."""
        self._close_files()
        self._locks.close()

    def _close_files(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
