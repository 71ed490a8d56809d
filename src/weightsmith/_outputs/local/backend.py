"""Unfinished work in a folder of this machine: its lock, journal, weight files, products and other files.

A `Destination` says what becomes of them: the folder gets its final name (`local.rename`), or the files are uploaded (`hub`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weightsmith._base.errors import NOTHING_WRITTEN, Busy, Finding, NoSpace, StoreError
from weightsmith._base.files import FULL
from weightsmith._outputs.journal import Entries, Journal, is_resumable, layout_hash, read_journal
from weightsmith._outputs.local import disk
from weightsmith._outputs.local.area import StagingArea, staging_folder
from weightsmith._outputs.local.claim import JOURNAL, PARTS, PRODUCTS, SPACE
from weightsmith._outputs.local.locks import FollowedJournals, part_journals, read_journals
from weightsmith._outputs.local.other_files import OtherFiles
from weightsmith._outputs.local.products import create_product, read_product, remove_parts, remove_product, write_product
from weightsmith._outputs.local.target import check_out, check_vacant
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._outputs.staging import BOOKKEEPING_BYTES
from weightsmith.abc.output import Built, Capabilities, Finished, OtherFile, OutputSpec, Progress, WeightFiles

if TYPE_CHECKING:
    from weightsmith._plans import Product
    from weightsmith.abc.output import Address, Arrays, BytesLike

ATTACH_SECONDS = 60
"""How long a process that builds a part waits for another one to prepare the staging folder."""


class FolderWeights(WeightFiles, Protocol):
    """Weight files that are, at least for a while, in the content folder."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the files that are in the folder at the end."""

    def reserve(self, space: int, other_bytes: int, more_bytes: int, folder: Path) -> None:
        """Reserve the space of the files that are there at a time, and write their headers. Raises NoSpace.

        space       open file that reserves `other_bytes` for the files that are not weights
        more_bytes  needed besides
        folder      the staging folder, for messages
        """

    def checksums(self, names: Iterable[str], threads: int, progress: Progress | None) -> dict[str, str]:
        """The checksums of these tensors as they are stored; names that the layout does not have are left out."""

    def is_taken(self, name: str) -> bool:
        """An earlier run has stored the tensor where it cannot be replaced. Written again all the same, it is ignored."""

    def finish(self, name: str) -> None:
        """All bytes of a tensor are written, and it is in the journal."""

    def sync(self) -> None:
        """Make the bytes durable."""

    def close(self) -> None:
        """Close the files. May be called twice."""


class Destination(Protocol):
    """Where the files of a folder go.

    kept  what remains of the work, for messages; `{folder}` stands for the staging folder
    """

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def out(self) -> Path | Address: ...
    @property
    def kept(self) -> str: ...

    def weights(self, backend: FolderBackend, entries: Entries) -> FolderWeights:
        """The weight files. entries: of the journal; of a new one if nothing is resumed."""

    def connect(self, backend: FolderBackend) -> None:
        """Prepare the destination. The folder is open."""

    def publish(self, backend: FolderBackend, journal: Journal, *, fsync: bool) -> Path | Address:
        """Publish the content, which is complete, and remove the folder."""

    def close(self) -> None:
        """See `OutputBackend.close`."""


class FolderBackend:
    """See `OutputBackend`.

    path       the output folder, or a local name of the output
    folder     the staging folder beside it
    area       the paths in it
    notes      what an earlier run has noted for this one: JSON values by key
    files      the files in it that are not weights
    left       what could not be cleaned up
    published  the output is visible; the folder may be there still
    """

    def __init__(self, path: Path, spec: OutputSpec, destination: Destination) -> None:
        """Change nothing on disk."""
        self.path, self.spec, self.destination = path, spec, destination
        self.capabilities = destination.capabilities
        self.area = StagingArea(path)
        self.folder, self._locks = self.area.folder, self.area.locks
        self.notes: dict[str, Any] = {}
        self.left: tuple[Finding, ...] = ()
        self.holds_work = self.published = False
        self._journal: Journal | None = None
        self._weights: FolderWeights | None = None
        self._tensors: dict[str, Finished] = {}
        self._products: dict[str, str] = {}
        self.files = OtherFiles(self.area.content)

    @property
    def out(self) -> Path | Address:
        """Path or address of the output."""
        return self.destination.out

    @property
    def disk(self) -> Path:
        """See `OutputBackend`."""
        return self.path.parent

    @property
    def weights(self) -> FolderWeights:
        """See `OutputBackend`."""
        return self._opened()[1]

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """See `OutputBackend`."""
        return self._locks.warnings + self.left

    @property
    def kept(self) -> str:
        """See `OutputBackend`."""
        return self.destination.kept.format(folder=self.folder)

    @property
    def is_open(self) -> bool:
        """See `OutputBackend`."""
        return self._locks.held

    def _opened(self) -> tuple[Journal, FolderWeights]:
        if self._journal is None or self._weights is None:
            raise ValueError(f"{self.folder}: this output is closed")
        return self._journal, self._weights

    # opening

    def open(self) -> None:
        """See `OutputBackend.open`; creates missing parent folders, which are never removed."""
        with self._preparing():
            if self.spec.part:
                self._join()
            else:
                self._take(self.spec.resume, self.spec.names, self.spec.progress)
            self.destination.connect(self)

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Say what a failed call to the file system means."""
        try:
            yield
        except OSError as error:
            self.close()
            if error.errno in FULL:
                raise disk.no_space(self.disk, self.spec.layout.total_bytes, state=NOTHING_WRITTEN, cause=error) from error
            fix = "raise the limit: ulimit -n 65536" if error.errno in disk.TOO_MANY_FILES else "choose another output folder"
            what = f"the output folder cannot be prepared: {error.strerror}"
            raise StoreError(what, where=str(self.area.out), fix=fix) from error

    def _take(self, resume: bool, names: Collection[str] | None, progress: Progress | None) -> None:
        """Take the folder for this process alone. names: of the tensors to take over if they are finished; None: all."""
        entries, spec = Entries(), self.spec
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(self.folder):
            entries = self._locks.take()
            self.area.recover(entries)
        self._check_vacant(NOTHING_WRITTEN)
        if not self._locks.held:
            entries = self._locks.take()  # another process may have come and gone meanwhile
        fresh = not (resume and self._is_resumable(entries))
        if fresh:
            self.area.empty()
        else:
            self.area.remove_other_files({shard.name for shard in spec.layout.shards})
            remove_parts(self.folder / PRODUCTS)
        try:
            self._journal = Journal(self.folder / JOURNAL)
            if fresh:
                self._journal.start(spec.plan_hash, layout_hash(spec.layout), spec.facts)
                self.area.content.mkdir()
            for path in part_journals(self.folder):  # lines of this run are newer
                self._journal.absorb(path)
            entries = Entries() if fresh else entries
            self.notes = entries.notes
            self._weights = self.destination.weights(self, entries)
            space = disk.open_own(self.folder / SPACE, os.O_RDWR)
            try:
                self._weights.reserve(space, spec.other_bytes, BOOKKEEPING_BYTES * len(spec.layout.places), self.folder)
            finally:
                os.close(space)
        except (NoSpace, OSError):
            if fresh:
                self.discard()
            raise
        if not fresh:
            self._take_over(entries, names, progress)

    def _join(self) -> None:
        """Build a part: prepare the folder if no process is in it, unless this one is helping another; then share it."""
        spec, deadline = self.spec, time.monotonic() + ATTACH_SECONDS
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
        self._weights = self.destination.weights(self, Entries())
        self._journal = Journal(self.folder / PARTS / f"journal-{spec.part}")
        self._take_over(read_journals(self.folder, spec.names), spec.names, spec.progress)

    def _is_resumable(self, entries: Entries) -> bool:
        """See `is_resumable`; False also for work cut off before its first line, or while it was being discarded."""
        if entries.lines == 0 or not self.area.content.is_dir():
            return False
        return is_resumable(entries, self.spec.plan_hash, self.spec.layout, self.spec.facts, self.folder)

    def _take_over(self, entries: Entries, names: Collection[str] | None, progress: Progress | None) -> None:
        """Take over all finished products, and the finished tensors (None: all) whose bytes on disk have the right checksum."""
        self._tensors = {name: done for name, done in entries.tensors.items() if names is None or name in names}
        self._products = dict(entries.products)
        self.holds_work = bool(entries.tensors or entries.products)
        self.reread(self._tensors, self.spec.threads, progress)

    def _check_vacant(self, state: str) -> None:
        try:
            check_vacant(self.path, overwrite=self.spec.overwrite, protected=self.spec.protected)
        except StoreError as error:
            error.state = state
            raise

    # tensors

    @property
    def records(self) -> dict[str, Finished]:
        """See `OutputBackend`."""
        return self._tensors.copy()  # in one step, while other threads enter more

    def finish(self, name: str, done: Finished) -> None:
        """See `OutputBackend.finish`; in the journal before it returns."""
        journal, weights = self._opened()
        if weights.is_taken(name) and self._tensors[name].checksum != done.checksum:
            what = "computed again, this tensor differs from what an earlier run has stored"
            fix = "run again with --no-resume (resume=False), which computes everything again"
            raise StoreError(what, where=f"{self.out}, tensor {name}", fix=fix)
        journal.tensor(name, done)
        self._tensors[name] = done
        weights.finish(name)

    def redo(self, names: Collection[str]) -> bool:
        """See `OutputBackend.redo`: each tensor has bytes of its own, which are written over."""
        return False

    def reread(self, names: Collection[str], threads: int, progress: Progress | None) -> None:
        """See `OutputBackend.reread`."""
        checksums = self.weights.checksums(names, threads, progress)
        for name in list(names):
            if checksums.get(name) != self._tensors[name].checksum:
                del self._tensors[name]

    def note(self, key: str, value: object) -> None:
        """Record a JSON value for a run that resumes this one. Thread-safe; on the disk before it returns."""
        self._opened()[0].note(key, value)

    # products

    @property
    def products(self) -> dict[str, str]:
        """See `OutputBackend`."""
        return self._products.copy()

    def product(self, product: Product) -> Arrays | None:
        """See `OutputBackend.product`."""
        checksum = self._products.get(product.name)
        return None if checksum is None else read_product(self.folder / PRODUCTS, product.name, product.outs, checksum)

    def create(self, product: Product) -> Arrays | None:
        """See `OutputBackend.create`."""
        self._opened()
        return create_product(self.folder / PRODUCTS, product.name, product.outs)

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """See `OutputBackend.keep`."""
        journal, _ = self._opened()
        checksum = write_product(self.folder / PRODUCTS, product.name, arrays)
        if not checksum:
            return arrays
        journal.product(product.name, checksum)
        self._products[product.name] = checksum
        return self.product(product) or arrays

    def forget(self, product: Product) -> None:
        """See `OutputBackend.forget`."""
        remove_product(self.folder / PRODUCTS, product.name)
        self._products.pop(product.name, None)

    # parts

    @contextmanager
    def only_process(self, waiting: Callable[[], None] | None) -> Iterator[None]:
        """See `Staging.only_process`."""
        with self._locks.products(waiting):
            self._products = read_journals(self.folder, ()).products
            yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """See `Staging.shared`."""
        content = self.area.content.stat().st_ino
        with ExitStack() as leading:
            self.weights.sync()  # or this machine may write a page of a header later, over a tensor of another machine
            leading.enter_context(self._locks.lead(ATTACH_SECONDS))
            self._locks.let_in()
            yield
        self._locks.take_back(ATTACH_SECONDS)
        if not self.area.content.is_dir() or self.area.content.stat().st_ino != content:
            raise Busy("another run has taken the unfinished work", where=str(self.path), fix="run again")

    def hand_over(self) -> Built:
        """See `Staging.hand_over`."""
        return Built(self.records, self.products, {})

    def adopt(self, built: Built) -> None:
        """See `Staging.adopt`: it is in the journal of the part."""
        self._tensors.update(built.tensors)
        self._products.update(built.products)

    def followed(self) -> FollowedJournals:
        """See `Staging.followed`."""
        return FollowedJournals(self.folder)

    # the end

    def add_file(self, name: str, data: BytesLike | Path) -> None:
        """See `OutputBackend.add_file`."""
        self._opened()
        (self.folder / SPACE).unlink(missing_ok=True)
        self.files.add(name, data)

    def publish(self, manifest: Callable[[Mapping[str, OtherFile]], bytes], *, fsync: bool) -> Path | Address:
        """See `OutputBackend.publish`."""
        journal, weights = self._opened()
        self.check_vacant()
        (self.folder / SPACE).unlink(missing_ok=True)
        layout = self.spec.layout
        if layout.index is not None:
            self.files.records[layout.index_name] = self.files.write(layout.index_name, layout.index)
        self.files.write(MANIFEST_NAME, manifest(self.files.records))
        self.files.check_names(weights.names)
        return self.destination.publish(self, journal, fsync=fsync)

    def check_vacant(self) -> None:
        """Raise OutputExists if others have written there meanwhile."""
        self._check_vacant(f"Everything is finished in {self.folder}")

    def discard(self) -> None:
        """See `OutputBackend.discard`."""
        if not self.is_open:
            raise ValueError(f"{self.folder}: this output is closed")
        self.close_files()
        if self.published:
            self.area.remove_replaced()
        self.area.remove()

    def close(self) -> None:
        """See `OutputBackend.close`."""
        self.close_files()
        self._locks.close()
        self.destination.close()

    def close_files(self) -> None:
        """Close journal and weight files."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None


def staged_plan(out: str | os.PathLike[str]) -> str:
    """The plan hash of interrupted work for this output folder, "" if there is none."""
    return read_journal(staging_folder(check_out(out)) / JOURNAL).plan
