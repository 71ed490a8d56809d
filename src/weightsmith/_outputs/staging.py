"""A checkpoint being built: tensors, products and other files go in, `publish` makes it visible as a whole.

Bytes are written in a staging folder on this machine (`local.area`), which has a lock, a journal, the weight files, products
and other files. Work interrupted at any point, even by power loss, is resumed from the journal. Where the finished files go is
the target's: a local folder renames them, a bucket and the Hub receive each weight file as soon as it is finished.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from weightsmith._base.errors import NOTHING_WRITTEN, Busy, Finding, NoSpace, StoreError
from weightsmith._base.files import FULL, expand_user
from weightsmith._base.idioms import Closing
from weightsmith._outputs import disk
from weightsmith._outputs.area import (
    OtherFiles,
    ProductFiles,
    StagingArea,
    left_behind,
)
from weightsmith._outputs.checksum import byte_view
from weightsmith._outputs.journal import Entries, Journal, Notes, is_resumable, layout_hash
from weightsmith._outputs.local import LocalTarget, check_out
from weightsmith._outputs.locks import (
    ADDRESS,
    JOURNAL,
    PARTS,
    PRODUCTS,
    SPACE,
    FollowedJournals,
    part_journals,
    read_journals,
)
from weightsmith._outputs.manifest import MANIFEST_NAME, check_file_name, encode_manifest
from weightsmith._outputs.weight_files import StagedFiles, StreamedFiles
from weightsmith.abc.output import Built, FilesGone, Finished, OutputSpec, Progress, Target

if TYPE_CHECKING:
    from weightsmith._plans import Product
    from weightsmith.abc.output import Arrays, BytesLike

BOOKKEEPING_BYTES = 400
"""Bytes of journal and manifest for each tensor."""
ATTACH_SECONDS = 60
"""How long a process that builds a part waits for another one to prepare the staging folder."""
_CHECKSUM = re.compile("[0-9a-f]{32}")
_PUT = "put "
"""Start of the keys of the notes about weight files that are put."""


class Staging(Closing):
    """A checkpoint being built. Created by `open`, completed by `publish`; `close` leaves work that can be resumed.

    target     where the output goes
    layout     where every byte goes
    plan_hash  identity of the plan; only work of the same plan is resumed
    path       the output folder, or a local name of the output
    folder     the staging folder beside it
    area       the paths in it
    holds_work  an earlier run has left a finished tensor or product
    published  the output is visible; the folder may be there still

    `write`, `finish`, `location` and `finished` may be used from any thread, for different tensors or parts of one.
    As a context manager it is closed at the end in any case; staged work is not removed.
    """

    def __init__(self, target: Target, spec: OutputSpec) -> None:
        """Use `Staging.open`. Changes nothing. Raises StoreError if no output can have this path."""
        self.target, self.layout, self.plan_hash = target, spec.layout, spec.plan_hash
        self._spec = spec
        self.path = staged_path(target, spec.folder, spec.part, helping=spec.helping)
        self.area = StagingArea(self.path)
        self.folder, self._locks = self.area.folder, self.area.locks
        self.holds_work = self.published = False
        self._left: tuple[Finding, ...] = ()
        self._journal: Journal | None = None
        self._weights: StagedFiles | None = None
        self._notes: MutableMapping[str, Any] = {}
        self._tensors: dict[str, Finished] = {}
        self._products: dict[str, str] = {}
        self._files = OtherFiles(self.area.content)
        self._product_files = ProductFiles(self.folder / PRODUCTS)
        self._names: set[str] = set()
        self._mutex, self._recording = threading.Lock(), threading.Lock()
        self._handed_over = False

    @classmethod
    def open(cls, target: Target, spec: OutputSpec) -> Self:
        """Take over what an interrupted run has finished, and prepare everything else.

        Creates missing parent folders, which are never removed. Raises OutputExists, CannotResume (for work of another plan),
        NoSpace, Busy, and StoreError for an output that cannot be written. Nothing is written then, and resumable work stays.
        """
        staging = cls(target, spec)
        try:
            with staging._preparing():
                if spec.part and not target.streams:
                    staging._join()
                else:
                    others = target.streams and not spec.part  # a driver looks for what its workers had finished
                    staging._take(spec.resume, None if others else spec.names, spec.progress)
        except BaseException as error:
            staging.close()
            if isinstance(error, StoreError):
                error.state = error.state or NOTHING_WRITTEN
            raise
        return staging

    @property
    def out(self) -> Path | Target:
        """Path or address of the output."""
        return self.path if isinstance(self.target, LocalTarget) else self.target

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What the user should know."""
        return self._locks.warnings + self.target.warnings + self._left

    @property
    def is_open(self) -> bool:
        """False once it is published, closed or discarded."""
        return self._locks.held

    @property
    def kept(self) -> str:
        """For messages: what remains of the work, and how to resume it."""
        what = "What is finished is uploaded or kept" if self.target.streams else "Finished tensors are kept"
        return f"{what} in {self.folder}; run again to resume."

    def _opened(self) -> tuple[Journal, StagedFiles]:
        if self._journal is None or self._weights is None:
            raise ValueError(f"{self.folder}: this output is closed")
        return self._journal, self._weights

    @property
    def weights(self) -> StagedFiles:
        """The weight files. Raises ValueError once it is closed."""
        return self._opened()[1]

    # errors

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Say what a failed call to the file system means."""
        try:
            yield
        except OSError as error:
            self.close()
            if error.errno in FULL:
                raise disk.no_space(self.path.parent, self.layout.total_bytes, state=NOTHING_WRITTEN, cause=error) from error
            fix = "raise the limit: ulimit -n 65536" if error.errno in disk.TOO_MANY_FILES else "choose another output folder"
            if isinstance(error, PermissionError) and str(error.filename).startswith(str(self.folder)):
                fix = "run all parts, and resume, as one user; or with a umask that lets all of them write"
            what = f"the output folder cannot be prepared: {error.strerror}"
            details = [] if error.filename in (None, str(self.path)) else [f"path  {error.filename}"]
            raise StoreError(what, where=str(self.path), details=details, fix=fix) from error

    @contextmanager
    def _kept(self, where: str = "", more_bytes: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Say in errors what is left. where: what is written; more_bytes: needed in addition to the unfinished tensors."""
        try:
            yield
        except (StoreError, OSError) as error:
            self._explain(error, where, more_bytes)

    def _explain(self, error: StoreError | OSError, where: str, more_bytes: Callable[[], int] = lambda: 0) -> NoReturn:
        """Raise the error of `_kept`. Called by itself where entering a context would take longer than the work."""
        if isinstance(error, StoreError):
            error.state = error.state or self.kept
            raise error
        place = f"{self.folder}, {where}" if where else str(self.folder)
        if error.errno in FULL:
            done, places = self.records, self.layout.places
            needed = more_bytes() + sum(place.nbytes for name, place in places.items() if name not in done)
            raise disk.no_space(self.path.parent, needed, state=self.kept, cause=error) from error
        what, fix = f"writing failed: {error.strerror}", "check the disk and its permissions, and run again"
        raise StoreError(what, where=place, fix=fix, state=self.kept) from error

    # opening

    def _take(self, resume: bool, names: Collection[str] | None, progress: Progress | None) -> None:
        """Take the folder for this process alone. names: of the tensors to take over if they are finished; None: all."""
        entries, spec = Entries(), self._spec
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(self.folder):
            entries = self._recovered()
        if not spec.helping:
            self._check_free(entries.notes if resume else {}, NOTHING_WRITTEN)
        if not self._locks.held:
            entries = self._locks.take()  # another process may have come and gone meanwhile
        fresh = not (resume and self._is_resumable(entries))
        if fresh:
            if entries.notes:
                self.target.discard(entries.notes)  # before the notes are gone
            self.area.empty()
        else:
            self.area.remove_other_files({shard.name for shard in self.layout.shards})
            self._product_files.remove_unfinished()
        entries = Entries() if fresh else entries
        try:
            self._begin(entries, fresh)
        except (NoSpace, OSError):
            if fresh:
                self.discard()
            raise
        if not fresh:
            self._take_over(entries, names, progress)
        self._connect()

    def _recovered(self) -> Entries:
        """Take the lock, and complete or undo a publish that was cut off. The folder may be gone afterwards."""
        entries = self._locks.take()
        self.area.recover(entries)
        if self._locks.held and self.target.recover(entries.notes):
            self.area.remove()
            return Entries()
        return entries

    def _begin(self, entries: Entries, fresh: bool) -> None:
        """Open journal and weight files, and reserve the space. entries: of the journal, none if it is `fresh`."""
        spec = self._spec
        self._journal = Journal(self.folder / JOURNAL)
        if fresh:
            self._journal.start(spec.plan_hash, layout_hash(spec.layout), spec.facts, len(spec.layout.places))
            self.area.content.mkdir()
        for path in part_journals(self.folder):  # lines of this run are newer
            self._journal.absorb(path)
        self._notes = Notes(entries.notes, self._journal)
        if fresh and self.target.streams and not self._leaderless:  # whoever removes this folder leaves the other parts alone
            self._notes[ADDRESS] = str(self.target)
        self._weights = self._new_weights(entries.tensors)
        space = disk.open_own(self.folder / SPACE, os.O_RDWR)
        try:
            more_bytes = BOOKKEEPING_BYTES * len(spec.layout.places)
            self._weights.reserve(space, spec.other_bytes, more_bytes, self.folder)
        finally:
            os.close(space)

    def _new_weights(self, tensors: Mapping[str, Finished]) -> StagedFiles:
        if not self.target.streams:
            return StagedFiles(self.area.content, self.layout)
        files = {key.removeprefix(_PUT): value for key, value in self._notes.items() if key.startswith(_PUT) and value}

        def put(name: str, path: Path) -> Any:
            value = self.target.put(name, path)
            self._notes[_PUT + name] = value
            self._record()
            return value

        return StreamedFiles(self.area.content, self.layout, tensors, files, put, self._spec.names, self.target.holds_back)

    def _connect(self) -> None:
        """Connect the target. If it cannot be used, and there is no work, nothing is left behind."""
        try:
            gone = self.target.connect(self._spec, self._notes, self.weights.put)
            self.weights.lost(gone)
            self._forget([name for name in self._tensors if self._shard_name(name) in gone])
            for name in gone:
                self._notes[_PUT + name] = None
            for built in self.target.built():
                self._adopt_there(built)
            self.weights.start(self._tensors)
        except BaseException as error:
            holds_work, kept = self.holds_work, self.kept
            if not holds_work:
                with suppress(StoreError, OSError):
                    self._remove()
            if isinstance(error, StoreError):
                error.state = error.state or (f"Nothing was published. {kept}" if holds_work else NOTHING_WRITTEN)
            raise

    def _adopt_there(self, built: Built) -> None:
        """Take over the files that another process has put, their tensors, and its products."""
        files = {name: value for name, value in built.files.items() if name not in self.weights.put}
        self.adopt(built._replace(tensors=self._tensors_of(built.tensors, files), files=files))

    def _tensors_of(self, tensors: Mapping[str, Finished], files: Collection[str]) -> dict[str, Finished]:
        """Those of some files."""
        return {name: done for name, done in tensors.items() if self._shard_name(name) in files}

    @property
    def _leaderless(self) -> bool:
        """This process builds a part that no driver has asked for, and the target keeps a record of it."""
        return bool(self._spec.part) and not self._spec.helping and self.target.streams

    def _record(self, *, done: bool = False) -> None:
        """Have the target keep what this process has finished: whole files, and products."""
        if self._leaderless:
            with self._recording:
                notes = {key.removeprefix(_PUT): value for key, value in self._notes.items() if key.startswith(_PUT)}
                files = {name: value for name, value in notes.items() if value}
                self.target.record(Built(self._tensors_of(self.records, files), dict(self._products), files), done=done)

    def _join(self) -> None:
        """Build a part: prepare the folder if no process is in it, unless this one is helping another; then share it."""
        spec, deadline = self._spec, time.monotonic() + ATTACH_SECONDS
        busy = Busy("other processes keep taking the unfinished work", where=str(self.path), fix="run again")
        while True:
            try:
                if not spec.helping:
                    self._take(True, (), None)
                    self.close()
            except Busy as error:
                busy = error
            if (entries := self._locks.share()) is not None or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if spec.helping:
            self._locks.check_led()
        if entries is None:
            raise busy
        if (entries.plan, entries.layout) != (spec.plan_hash, layout_hash(spec.layout)):
            entries = read_journals(self.folder)  # for the message
        if not self._is_resumable(entries):
            raise StoreError("another process has just removed the unfinished work", where=str(self.folder), fix="run again")
        self._locks.take_part(spec.part)
        self._weights = StagedFiles(self.area.content, self.layout)
        self._journal = Journal(self.folder / PARTS / f"journal-{spec.part}")
        if spec.names is not None:
            self._journal.part(len(spec.names))
        self._notes = Notes({}, self._journal)
        self._take_over(read_journals(self.folder, spec.names), spec.names, spec.progress)

    def _is_resumable(self, entries: Entries) -> bool:
        """Whether this run continues the work here: not what was cut off before its first line, or while it was discarded."""
        if entries.lines == 0 or not self.area.content.is_dir():
            return False
        return is_resumable(entries, self.plan_hash, self.layout, self._spec.facts, self.folder)

    def _take_over(self, entries: Entries, names: Collection[str] | None, progress: Progress | None) -> None:
        """Take over all finished products, and the finished tensors (None: all) whose bytes on disk have the right checksum.

        Files of parts that have ended, and that nobody has written to since, are not read again.
        """
        self._tensors = {name: done for name, done in entries.tensors.items() if names is None or name in names}
        self._products = dict(entries.products)
        self.holds_work = bool(entries.tensors or entries.products)
        known = set[str]() if self.target.streams else self.weights.unchanged(entries.files)
        checksums = self.weights.checksums(self._tensors.keys() - known, self._spec.threads, progress)
        self._forget(
            [name for name, done in self._tensors.items() if name not in known and checksums.get(name) != done.checksum]
        )

    def _forget(self, names: Collection[str]) -> None:
        for name in names:
            self._tensors.pop(name, None)

    def _check_free(self, notes: Mapping[str, Any], state: str) -> None:
        spec = self._spec
        try:
            self.target.check_free(overwrite=spec.overwrite, protected=spec.protected, reads=spec.reads, notes=notes)
        except StoreError as error:
            error.state = state
            raise

    # tensors

    @property
    def finished(self) -> frozenset[str]:
        """Names of the finished tensors: of an earlier run, if their stored bytes are right, or of this one. A snapshot."""
        return frozenset(self._tensors.copy())

    @property
    def records(self) -> dict[str, Finished]:
        """The finished tensors by name. A snapshot."""
        return self._tensors.copy()  # in one step, while other threads enter more

    def location(self, name: str) -> tuple[int, int] | None:
        """Open file and byte offset of a tensor, for copy_file_range and the like.

        The file is closed by `close`. May wait, as `write` does.
        """
        try:
            return self.weights.location(name)
        except (StoreError, OSError) as error:
            self._explain(error, f"tensor {name}")

    def write(self, name: str, start_byte: int, buffer: BytesLike) -> None:
        """Write a C-contiguous buffer at byte `start_byte` of a tensor. Thread-safe; see `WeightFile.write` for what is fast.

        Waits while too many files wait for their upload. Raises NoSpace, StoreError, also for an upload that failed; ValueError
        when the bytes would fall outside the tensor.
        """
        view, nbytes = byte_view(buffer), self.layout.places[name].nbytes
        if start_byte < 0 or start_byte + view.nbytes > nbytes:
            raise ValueError(f"{name}: bytes {start_byte}..{start_byte + view.nbytes} of a tensor of {nbytes} bytes")
        try:
            self.weights.write(name, start_byte, view)
        except (StoreError, OSError) as error:
            self._explain(error, f"tensor {name}")

    def finish(self, name: str, done: Finished) -> None:
        """Record that all bytes of a tensor are written: in the journal before it returns. Thread-safe."""
        if name not in self.layout.places:
            raise KeyError(name)
        if not _CHECKSUM.fullmatch(done.checksum):
            raise ValueError(f"{name}: {done.checksum!r} is not a checksum of 32 hex digits")
        try:
            journal, weights = self._opened()
            journal.tensor(name, done)
            self._tensors[name] = done
            weights.finish(name)
        except (StoreError, OSError) as error:
            self._explain(error, f"journal, tensor {name}")

    def redo(self, names: Collection[str]) -> bool:
        """These finished tensors are computed again. True if others, in files that are put, must be too."""
        with self._kept():
            files = self.weights.reopen(names)
            for file in files:
                self._notes[_PUT + file] = None
            again = [name for name in self._tensors if self._shard_name(name) in files and name not in names]
            self._forget(again)
            return bool(again)

    def _shard_name(self, name: str) -> str:
        place = self.layout.places.get(name)
        return "" if place is None else self.layout.shards[place.shard].name

    def abandon(self) -> None:
        """Wake threads that wait for an upload: the run has failed. May be called several times."""
        self.weights.abandon()

    # products

    @property
    def products(self) -> dict[str, str]:
        """The checksums of the finished products by name. A snapshot."""
        return {**self._spec.products, **self._products}

    def product(self, product: Product) -> Arrays | None:
        """The arrays of a product that an earlier run or another process finished; None if there are none."""
        checksum = self.products.get(product.name)
        if checksum is None:
            return None
        files = self._product_files
        with self._kept():
            arrays = files.read(product.name, product.outs, checksum)
            if arrays is not None or not (self.target.streams and self.target.parts):
                return arrays
            path = files.path(product.name)
            files.folder.mkdir(exist_ok=True)
            with suppress(StoreError):  # it is made again
                self.target.fetch(path.name, path)
            return files.read(product.name, product.outs, checksum)

    @property
    def _shares(self) -> bool:
        """Other processes, which do not see this folder, build parts."""
        return self.target.streams and self._spec.names is not None

    def create(self, product: Product) -> Arrays | None:
        """Arrays in a file for a product that is being computed, for `keep`; None if the disk cannot take them."""
        with self._kept():
            self._opened()
            return self._product_files.create(product.name, product.outs)

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """Store the arrays of a finished product, for a run that resumes this one. Thread-safe.

        Returns them, mapped from their file if the disk could take them.
        """
        with self._kept(f"journal, product {product.name}"):
            journal, _ = self._opened()
            checksum = self._product_files.write(product.name, arrays)
            if not checksum:
                return arrays
            if self._shares and not product.transient:
                path = self._product_files.path(product.name)
                self.target.share(path.name, path)
            journal.product(product.name, checksum)
            self._products[product.name] = checksum
            if not product.transient:
                self._record()
            return self.product(product) or arrays

    def forget(self, product: Product) -> None:
        """Remove a product that nothing needs any more."""
        self._product_files.remove(product.name)
        self._products.pop(product.name, None)

    # parts that other processes build

    def look_for_products(self) -> None:
        """Take note of the products that other processes in this folder have finished."""
        with self._kept():
            self._products = read_journals(self.folder, ()).products

    @contextmanager
    def only_process(
        self, waiting: Callable[[], None] | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Wait until no other part is inside, and see the products that they have finished.

        waiting    called if one is
        meanwhile  called repeatedly while one is
        """
        if self.target.streams:  # the driver has one process compute them
            yield
            return
        with self._locks.products(waiting, meanwhile):
            self.look_for_products()
            yield

    def check_led(self) -> None:
        """Raise StoreError unless the driver of this process is there."""
        self._locks.check_led()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let other processes build parts meanwhile; `adopt` what they have finished.

        Raises Busy if one of them, or another run, is still there at the end.
        """
        if self.target.streams:  # they have folders of their own
            with self._kept():
                self.target.make_way()
            yield
            return
        content = self.area.content.stat().st_ino
        with ExitStack() as leading:
            with self._kept("headers and locks"):
                self.weights.sync()  # or this machine may write a page of a header later, over a tensor of another machine
                leading.enter_context(self._locks.lead(ATTACH_SECONDS))
                self._locks.let_in()
            yield
        with self._kept():
            self._locks.take_back(ATTACH_SECONDS)
            if not self.area.content.is_dir() or self.area.content.stat().st_ino != content:
                raise Busy("another run has taken the unfinished work", where=str(self.path), fix="run again")

    def hand_over(self, *, durable: bool = False) -> Built:
        """What this process, which builds a part, has finished. Waits until all of it is where it belongs.

        durable  also until it is on the disk, so that the run that publishes need not read it again
        """
        with self._kept():
            self.weights.drain(None)
            if durable and not self.target.streams:
                for name, state in self.weights.synced(self._tensors).items():
                    self._opened()[0].file(name, state)
            self._record(done=True)
            self._handed_over = True
            return Built(self.records, dict(self._products), dict(self.weights.put))

    def adopt(self, built: Built) -> None:
        """Take over what a process that built a part has finished; the bytes of the tensors are not read again."""
        with self._kept():
            journal, weights = self._opened()
            if self.target.streams:  # in a folder, it is in the journal of the part
                for name, done in built.tensors.items():
                    journal.tensor(name, done)
                for name, checksum in built.products.items():
                    journal.product(name, checksum)
                self._notes.update({_PUT + name: value for name, value in built.files.items()})
                weights.adopt(built.files)
            self._tensors.update(built.tensors)
            self._products.update(built.products)

    def followed(self) -> FollowedJournals:
        """What other processes finish while they build parts in this folder."""
        return FollowedJournals(self.folder)

    # other files

    def add_file(self, name: str, data: BytesLike | Path) -> None:
        """Add a file that is not a weight: its bytes, or a file to copy (links to it are followed).

        name  relative path with `/`; it cannot leave the folder, nor be a weight file, its index or the manifest
        """
        check_file_name(name)
        with self._mutex:
            if name in self._names:
                raise StoreError("the output has a file of this name already", where=name)
            self._names.add(name)
        with self._kept(name, lambda: data.stat().st_size if isinstance(data, Path) else byte_view(data).nbytes):
            self._opened()
            (self.folder / SPACE).unlink(missing_ok=True)
            self._files.add(name, data)

    # the end

    def publish(self, manifest: Mapping[str, Any], *, fsync: bool = True) -> Path | Target:
        """Check that the output is complete, and make it visible with index and manifest: its path or address.

        manifest  further JSON values for the manifest
        fsync     False does not wait until the bytes are on the local disk: faster, but they may be lost in a power cut

        Raises StoreError if a tensor is missing or a file does not match the layout, OutputExists if others have written there
        meanwhile; the staged work then stays. Once it is published nothing is raised: what cannot be cleaned up is in
        `warnings`.
        """
        if self._spec.part:
            raise ValueError(f"{self.folder}: a part cannot publish the whole")
        with self._kept(
            "publish", lambda: BOOKKEEPING_BYTES * len(self.layout.places) + sum(map(len, self.layout.indexes.values()))
        ):
            weights, records = self.weights, self.records
            self._check_complete([f"tensor {name} is not finished" for name in self.layout.places if name not in records])
            weights.drain(self._spec.uploading)
            self._check_complete(weights.problems())
            self._check_still_free()
            self._add_index_and_manifest(manifest)
            self._publish(fsync)
        self._clean_up(fsync)
        return self.out

    def _check_complete(self, problems: list[str]) -> None:
        if problems:
            raise StoreError(f"not published: {len(problems):,} problems", where=str(self.out), details=problems[:20])

    def _check_still_free(self) -> None:
        """Raise OutputExists if others have written there meanwhile. Servers are asked by `Target.publish`."""
        if not self.target.streams:
            self._check_free(self._notes, f"Everything is finished in {self.folder}")

    def _add_index_and_manifest(self, manifest: Mapping[str, Any]) -> None:
        (self.folder / SPACE).unlink(missing_ok=True)
        layout, files = self.layout, self._files
        for name, index in layout.indexes.items():
            files.records[name] = files.write(name, index)
        files.write(MANIFEST_NAME, encode_manifest(layout, self.plan_hash, self.records, files.records, manifest))
        files.check_names(self.weights.names)

    def _publish(self, fsync: bool) -> None:
        journal, weights = self._opened()
        if not self.target.streams:
            if fsync:
                weights.sync()
                self._files.sync()
            self._check_still_free()  # syncing may have taken minutes
            about = self.area.content.stat()
            journal.publish(about.st_dev, about.st_ino)
        try:
            self.target.publish(self.area.content, weights.put, fsync=fsync)
        except FilesGone as error:
            for name in error.names:
                self._notes[_PUT + name] = None
            raise
        self.published = True

    def _clean_up(self, fsync: bool) -> None:
        self._close_files()
        try:
            if fsync and not self.target.streams:
                disk.fsync_folder(self.path.parent)
            self._remove()
        except (OSError, StoreError) as error:
            self._left = (left_behind(error, self.folder),)
        self.close()

    def discard(self) -> None:
        """Remove the staged work. The output is not touched."""
        if not self.is_open:
            raise ValueError(f"{self.folder}: this output is closed")
        if self._weights is not None:
            self._weights.settle()
        if self._notes and not self.published and not self._spec.part:
            self.target.discard(self._notes)
        self._remove()
        self.target.close()

    def _remove(self) -> None:
        """Remove the folder and release the lock."""
        self._close_files()
        if self.published and isinstance(self.target, LocalTarget):
            self.area.remove_replaced()
        self.area.remove()

    def close(self) -> None:
        """Close files and connections, end threads, release the lock; work stays. May be called twice."""
        self._close_files()
        self.target.close()
        ended = self._handed_over or not self._leaderless  # else the same part resumes here
        if self._spec.part and self.target.streams and self.is_open and ended:  # what it has finished is put and handed over
            with suppress(OSError, StoreError):
                self.area.remove()
        self._locks.close()

    def _close_files(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None


def staged_path(target: Target, folder: str | os.PathLike[str] | None = None, part: str = "", *, helping: bool = False) -> Path:
    """The output folder, or a local name beside which its work is kept. Raises StoreError if no output can have this path.

    folder   in which work for an output elsewhere is kept; None: the current folder
    part     label of the part that this process builds: it has a folder of its own; "" for the whole
    helping  for a driver on another machine, perhaps
    """
    if isinstance(target, LocalTarget):
        return check_out(target.path)
    if not target.streams:
        return target.local
    if helping:
        from weightsmith._files.remote.ahead import spool_folder

        return spool_folder() / f"{target.local.name}.{part}"
    name = f"{target.local.name}.{part}" if part else target.local.name
    return check_out((target.local.parent if folder is None else expand_user(folder)) / name)
