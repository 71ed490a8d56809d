"""A checkpoint being built: tensors, products and other files go in, `publish` makes it visible as a whole.

Work interrupted at any point, even by power loss, is resumed from a journal. Where bytes and journal are, and how an output
becomes visible, is the backend's: a local folder, a bucket, the Hub.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from weightsmith._base.errors import NOTHING_WRITTEN, Finding, StoreError
from weightsmith._base.files import FULL
from weightsmith._base.idioms import Closing
from weightsmith._outputs.checksum import byte_view
from weightsmith._outputs.local import disk
from weightsmith._outputs.manifest import check_file_name, encode_manifest
from weightsmith.abc.output import Built, Capabilities, Finished, Followed, OutputBackend, OutputSpec, Progress

if TYPE_CHECKING:
    from weightsmith._base.files import Extent
    from weightsmith._plans import Product
    from weightsmith.abc.output import Address, Arrays, BytesLike

BOOKKEEPING_BYTES = 400
"""Bytes of journal and manifest for each tensor."""
_CHECKSUM = re.compile("[0-9a-f]{32}")


class Staging(Closing):
    """A checkpoint being built. Created by `open`, completed by `publish`; `close` leaves work that can be resumed.

    backend    keeps the bytes
    layout     where every byte goes
    plan_hash  identity of the plan; only work of the same plan is resumed

    `write`, `finish`, `location` and `finished` may be used from any thread, for different tensors or parts of one.
    As a context manager it is closed at the end in any case; staged work is not removed.
    """

    def __init__(self, backend: OutputBackend, spec: OutputSpec) -> None:
        """Use `Staging.open`."""
        self.backend, self.layout, self.plan_hash = backend, spec.layout, spec.plan_hash
        self._spec = spec
        self._files: set[str] = set()
        self._mutex = threading.Lock()

    @classmethod
    def open(cls, backend: OutputBackend, spec: OutputSpec) -> Self:
        """Take over what an interrupted run has finished, and prepare everything else.

        Raises OutputExists, CannotResume (for work of another plan), NoSpace, Busy, and StoreError for an output that cannot be
        written. Nothing is written then, and resumable work stays.
        """
        staging = cls(backend, spec)
        try:
            backend.open()
        except BaseException as error:
            staging.close()
            if isinstance(error, StoreError):
                error.state = error.state or NOTHING_WRITTEN
            raise
        return staging

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do."""
        return self.backend.capabilities

    @property
    def out(self) -> Path | Address:
        """Path or address of the output."""
        return self.backend.out

    @property
    def folder(self) -> Path | str:
        """Where unfinished work is, for messages."""
        return self.backend.folder

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What the user should know."""
        return self.backend.warnings

    @property
    def is_open(self) -> bool:
        """False once it is published, closed or discarded."""
        return self.backend.is_open

    @contextmanager
    def _kept(self, where: str = "", more_bytes: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Say in errors what is left. where: what is written; more_bytes: needed in addition to the unfinished tensors."""
        try:
            yield
        except StoreError as error:
            error.state = error.state or self.backend.kept
            raise
        except OSError as error:
            kept, place = self.backend.kept, f"{self.folder}, {where}" if where else str(self.folder)
            if error.errno in FULL:
                done, places = self.records, self.layout.places
                needed = more_bytes() + sum(place.nbytes for name, place in places.items() if name not in done)
                raise disk.no_space(self.backend.disk, needed, state=kept, cause=error) from error
            what, fix = f"writing failed: {error.strerror}", "check the disk and its permissions, and run again"
            raise StoreError(what, where=place, fix=fix, state=kept) from error

    # tensors

    @property
    def finished(self) -> frozenset[str]:
        """Names of the finished tensors: of an earlier run, if their stored bytes are right, or of this one. A snapshot."""
        return frozenset(self.records)

    @property
    def records(self) -> dict[str, Finished]:
        """The finished tensors by name. A snapshot."""
        return self.backend.records

    @property
    def holds_work(self) -> bool:
        """An earlier run has left a finished tensor or product."""
        return self.backend.holds_work

    def location(self, name: str) -> tuple[int, int] | None:
        """Open file and byte offset of a tensor, for copy_file_range and the like; None if its bytes go to no file.

        The file is closed by `close`. May wait, as `write` does.
        """
        with self._kept(f"tensor {name}"):
            return self.backend.weights.location(name)

    def write(self, name: str, start_byte: int, buffer: BytesLike) -> None:
        """Write a C-contiguous buffer at byte `start_byte` of a tensor. Thread-safe; see `WeightFile.write` for what is fast.

        Waits while too much waits for its upload. Raises NoSpace, StoreError, also for an upload that failed; ValueError when
        the bytes would fall outside the tensor.
        """
        view, nbytes = byte_view(buffer), self.layout.places[name].nbytes
        if start_byte < 0 or start_byte + view.nbytes > nbytes:
            raise ValueError(f"{name}: bytes {start_byte}..{start_byte + view.nbytes} of a tensor of {nbytes} bytes")
        with self._kept(f"tensor {name}"):
            self.backend.weights.write(name, start_byte, view)

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """See `Output.equal`."""
        if self.capabilities.copies:
            self.backend.weights.equal(name, start_byte, extent)

    def finish(self, name: str, done: Finished) -> None:
        """Record that all bytes of a tensor are written. Thread-safe."""
        if name not in self.layout.places:
            raise KeyError(name)
        if not _CHECKSUM.fullmatch(done.checksum):
            raise ValueError(f"{name}: {done.checksum!r} is not a checksum of 32 hex digits")
        with self._kept(f"journal, tensor {name}"):
            self.backend.finish(name, done)

    def redo(self, names: Collection[str]) -> bool:
        """These finished tensors are computed again. True if others, which are stored with them, must be too."""
        with self._kept():
            return self.backend.redo(names)

    def reread(self, names: Collection[str], threads: int, progress: Progress | None = None) -> None:
        """Keep those of these finished tensors whose stored bytes have the right checksum."""
        self.backend.reread(names, threads, progress)

    def abandon(self) -> None:
        """Wake threads that wait for an upload: the run has failed. May be called several times."""
        self.backend.weights.abandon()

    # products

    @property
    def products(self) -> dict[str, str]:
        """The checksums of the finished products by name. A snapshot."""
        return self.backend.products

    def product(self, product: Product) -> Arrays | None:
        """The arrays of a product that an earlier run or another process finished; None if there are none."""
        with self._kept():
            return self.backend.product(product)

    def create(self, product: Product) -> Arrays | None:
        """Arrays in a file for a product that is being computed, for `keep`; None if the disk cannot take them."""
        with self._kept():
            return self.backend.create(product)

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """Store the arrays of a finished product, for a run that resumes this one. Thread-safe.

        Returns them, mapped from their file if the disk could take them.
        """
        with self._kept(f"journal, product {product.name}"):
            return self.backend.keep(product, arrays)

    def forget(self, product: Product) -> None:
        """Remove a product that nothing needs any more."""
        self.backend.forget(product)

    # parts that other processes build

    def only_process(self, waiting: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Wait until no other part is inside, and see the products that they have finished. waiting: called if one is."""
        return self.backend.only_process(waiting)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let other processes build parts meanwhile; `adopt` what they have finished.

        Raises Busy if one of them, or another run, is still there at the end.
        """
        with ExitStack() as stack:
            with self._kept("headers and locks"):
                stack.enter_context(self.backend.shared())
            yield
            with self._kept():
                stack.close()

    def hand_over(self) -> Built:
        """What this process, which builds a part, has finished. Waits until all of it is stored."""
        with self._kept():
            return self.backend.hand_over()

    def adopt(self, built: Built) -> None:
        """Take over what a process that built a part has finished; the bytes of the tensors are not read again."""
        with self._kept():
            self.backend.adopt(built)

    def followed(self) -> Followed:
        """What other processes finish while they build parts."""
        return self.backend.followed()

    # other files

    def add_file(self, name: str, data: BytesLike | Path) -> None:
        """Add a file that is not a weight: its bytes, or a file to copy (links to it are followed).

        name  relative path with `/`; it cannot leave the folder, nor be a weight file, its index or the manifest
        """
        check_file_name(name)
        with self._mutex:
            if name in self._files:
                raise StoreError("the output has a file of this name already", where=name)
            self._files.add(name)
        with self._kept(name, lambda: data.stat().st_size if isinstance(data, Path) else byte_view(data).nbytes):
            self.backend.add_file(name, data)

    # the end

    def publish(self, manifest: Mapping[str, Any], *, fsync: bool = True) -> Path | Address:
        """Check that the output is complete, and make it visible with index and manifest: its path or address.

        manifest  further JSON values for the manifest
        fsync     False does not wait until the bytes are on the local disk: faster, but they may be lost in a power cut

        Raises StoreError if a tensor is missing or a file does not match the layout, OutputExists if others have written there
        meanwhile; the staged work then stays. Once it is published nothing is raised: what cannot be cleaned up is in
        `warnings`.
        """
        if self._spec.part:
            raise ValueError(f"{self.folder}: a part cannot publish the whole")
        weights = self.backend.weights
        with self._kept("publish", lambda: BOOKKEEPING_BYTES * len(self.layout.places) + len(self.layout.index or b"")):
            weights.drain(self._spec.uploading)
            records = self.records
            problems = [f"tensor {name} is not finished" for name in self.layout.places if name not in records]
            problems += weights.problems()
            if problems:
                raise StoreError(f"not published: {len(problems):,} problems", where=str(self.out), details=problems[:20])
            encode = partial(encode_manifest, self.layout, self.plan_hash, records, more=manifest)
            return self.backend.publish(encode, fsync=fsync)

    def discard(self) -> None:
        """Remove the unfinished work. The output is not touched."""
        self.backend.discard()

    def close(self) -> None:
        """Close files, end threads and release the lock; staged work stays, and is resumed. May be called twice."""
        self.backend.close()
