"""A checkpoint being built in a bucket: `store.Staging` for outputs that are uploaded while they are computed.

    models/
      out/                              nothing, or the checkpoint that will be replaced; parts of uploads are not visible
      .out.weightsmith-staging/
        lock                            held by the process that builds the output (`buckets.lock`)
        journal                         what is uploaded (`buckets.journal`)

An object store has no rename. Nothing under the output changes until everything is uploaded. Then the files appear in an order
in which no reader takes part of them for a model: config.json and the index after the weights, and after old weights of other
names are deleted; the manifest last. If publishing was cut off, the next run completes it. Products are kept in a staging
folder of this machine.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from weightsmith.buckets.contents import check_vacant
from weightsmith.buckets.journal import CHECKSUM, State, read_state
from weightsmith.buckets.lock import Lock
from weightsmith.buckets.prefix import Prefix
from weightsmith.buckets.stores import open_bucket
from weightsmith.buckets.uploads import Uploads, discard, discard_empty
from weightsmith.containers import Layout, make_layout
from weightsmith.containers.safetensors import INDEX_NAME
from weightsmith.errors import NOTHING_WRITTEN, Finding, StoreError, WeightsmithError
from weightsmith.formats.files import open_regular
from weightsmith.store.checksum import byte_view, hash_bytes
from weightsmith.store.journal import Finished
from weightsmith.store.manifest import MANIFEST_NAME, OtherFile, encode_manifest
from weightsmith.store.resume import is_resumable, layout_hash
from weightsmith.store.staging import Staging
from weightsmith.store.target import check_file_name
from weightsmith.tensors import TensorSpec

if TYPE_CHECKING:
    from weightsmith.formats.files import Extent
    from weightsmith.plans import Product
    from weightsmith.store.checksum import BytesLike
    from weightsmith.store.products import Arrays

JOURNAL, LOCK = "journal", "lock"
_ENTRANCES = (INDEX_NAME, "config.json", "adapter_config.json")
"""Files that loaders read first: written after all others, but for the manifest."""


class BucketStaging:
    """A checkpoint being built in a bucket; see `store.Staging`, whose methods it has.

    out        the address of the output
    folder     the address, for messages
    layout     where every byte goes
    plan_hash  identity of the plan; only work of the same plan is resumed
    """

    def __init__(self, out: Prefix, layout: Layout, plan_hash: str, overwrite: bool, reads: Sequence[str]) -> None:
        """Use `BucketStaging.open`."""
        self.out, self.layout, self.plan_hash = out, layout, plan_hash
        self.folder = str(out)
        self._overwrite, self._reads = overwrite, tuple(reads)
        self._bucket = open_bucket(out)
        self._lock = Lock(self._bucket, f"{out.staging}/{LOCK}", str(out))
        self._journal = f"{out.staging}/{JOURNAL}"
        self._state = State(plan_hash, layout_hash(layout), {}, secrets.token_hex(16))
        self._uploads: Uploads | None = None
        self._files: dict[str, bytes | Path] = {}
        self._products: Staging | None = None
        self._resume = True
        self._mutex = threading.Lock()

    @classmethod
    def open(
        cls,
        out: Prefix,
        layout: Layout,
        plan_hash: str,
        *,
        facts: Mapping[str, str],
        resume: bool,
        overwrite: bool,
        reads: Sequence[str],
    ) -> BucketStaging:
        """Take the lock, find what an interrupted run has uploaded, and begin the other uploads.

        reads  what the run reads, as the user names it: never replaced

        Everything else is as for `store.Staging.open`. Raises OutputExists, CannotResume, Busy, and StoreError for a store that
        cannot be used.
        """
        staging = cls(out, layout, plan_hash, overwrite, reads)
        try:
            staging._open(facts, resume)
        except BaseException as error:
            staging.close()
            if isinstance(error, StoreError):
                error.state = error.state or NOTHING_WRITTEN
            raise
        return staging

    def _open(self, facts: Mapping[str, str], resume: bool) -> None:
        self._lock.take()
        self._state.facts, self._resume = facts, resume
        found = read_state(self._bucket, self._journal)
        unwanted: Mapping[str, str] = {}
        if found is not None:
            state, entries, _ = found
            if resume and is_resumable(entries, self.plan_hash, self.layout, facts, self.folder) and state.token:
                self._state = state
            else:
                unwanted = state.uploads
                left = [name for names in state.publishing or () for name in names]
                self._state.publishing = ((), tuple(left)) if left else None
        self._check_vacant()
        if unwanted:
            discard(self._bucket, self.out, unwanted)
        self._uploads = Uploads(self._bucket, self.out, self.layout, self._state, self._lock, self._journal)
        self._uploads.write_headers()

    def _check_vacant(self, state: str = NOTHING_WRITTEN) -> tuple[str, ...]:
        """The names that will be replaced."""
        ours = {name for names in self._state.publishing or () for name in names}
        try:
            return check_vacant(self._bucket, self.out, overwrite=self._overwrite, reads=self._reads, ours=ours)
        except StoreError as error:
            error.state = error.state and state
            raise

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What the user should know."""
        return self._lock.warnings + (() if self._products is None else self._products.warnings)

    # tensors

    @property
    def finished(self) -> frozenset[str]:
        """Names of the finished tensors. A snapshot."""
        return frozenset(self._opened().records)

    @property
    def records(self) -> dict[str, Finished]:
        """The finished tensors by name. A snapshot."""
        return self._opened().records

    @property
    def holds_work(self) -> bool:
        """There is a finished tensor, or a finished product that was asked for."""
        return bool(self.records or self.products)

    def location(self, name: str) -> None:
        """They are in no file."""

    def write(self, name: str, start_byte: int, buffer: BytesLike) -> None:
        """Write a C-contiguous buffer at byte `start_byte` of a tensor. Thread-safe. Raises StoreError, NoSpace."""
        with self._kept():
            self._opened().write(name, start_byte, byte_view(buffer))

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """These bytes, which are about to be written, may be copied from an object, without being sent."""
        self._opened().equal(name, start_byte, extent)

    def finish(self, name: str, done: Finished) -> None:
        """Record that all bytes of a tensor are written. Thread-safe."""
        if name not in self.layout.places:
            raise KeyError(name)
        if not CHECKSUM.fullmatch(done.checksum):
            raise ValueError(f"{name}: {done.checksum!r} is not a checksum of 32 hex digits")
        with self._kept():
            self._opened().finish(name, done)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Say what is left, in errors of the store."""
        try:
            yield
        except StoreError as error:
            error.state = error.state or f"Uploaded parts are kept at {self.out}; run again to resume."
            raise

    def _opened(self) -> Uploads:
        if self._uploads is None:
            raise ValueError(f"{self.out}: this output is closed")
        return self._uploads

    # products

    def _local(self) -> Staging:
        """The staging folder of the products, on this machine."""
        with self._mutex:
            if self._products is None:
                self._products = Staging.open(
                    f"{self.out.local_name}.products",
                    make_layout([], 1),
                    self.plan_hash,
                    facts=self._state.facts,
                    resume=self._resume,
                )
            return self._products

    @property
    def products(self) -> dict[str, str]:
        """See `store.Staging.products`; {} before the first one is asked for."""
        return {} if self._products is None else self._products.products

    def product(self, name: str, outs: Sequence[TensorSpec]) -> Arrays | None:
        """See `store.Staging.product`."""
        return self._local().product(name, outs)

    def create(self, product: Product) -> Arrays | None:
        """See `store.Staging.create`."""
        return self._local().create(product)

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """See `store.Staging.keep`."""
        return self._local().keep(product, arrays)

    def forget(self, product: Product) -> None:
        """See `store.Staging.forget`."""
        self._local().forget(product)

    @contextmanager
    def only_process(self, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """One process builds an output in a bucket."""
        yield

    # other files, and the end

    def add_file(self, name: str, data: BytesLike | Path) -> None:
        """Add a file that is not a weight: its bytes, or a file to copy. It is uploaded by `publish`."""
        check_file_name(name)
        if name in self._files:
            raise StoreError("the output has a file of this name already", where=name)
        self._files[name] = data if isinstance(data, Path) else bytes(byte_view(data))

    def publish(self, manifest: Mapping[str, Any], *, fsync: bool = True) -> Prefix:
        """Upload what is left, then make the output visible: the other files, the weights, the index, the manifest.

        Raises StoreError if a tensor is missing, OutputExists if others have written there meanwhile. What is uploaded stays.
        """
        with self._kept():
            uploads = self._opened()
            uploads.drain()
            if problems := uploads.problems():
                raise StoreError(f"not published: {len(problems):,} problems", where=str(self.out), details=problems[:20])
            there = self._check_vacant(f"Everything is uploaded to {self.out}, and not published")
            self._publish(uploads, there, manifest)
        if self._products is not None:
            self._products.discard()
        return self.out

    def _publish(self, uploads: Uploads, there: Sequence[str], manifest: Mapping[str, Any]) -> None:
        index = [] if self.layout.index is None else [INDEX_NAME]
        names = {MANIFEST_NAME, *self._files, *index, *(shard.name for shard in self.layout.shards)}
        self._state.publishing = tuple(sorted(names)), tuple(sorted({*there, *(self._state.publishing or ((), ()))[1]} - names))
        self._lock.renew()
        uploads.save()
        for name in (MANIFEST_NAME, *_ENTRANCES):  # a model without them is not taken for one while it is replaced
            if name in there:
                self._delete(name)
        records = {name: self._upload(name, data) for name, data in self._files.items() if name not in _ENTRANCES}
        uploads.complete()
        self._lock.renew()
        for name in self._state.publishing[1]:  # a loader that finds the new config.json must not find old weights with it
            self._delete(name)
        if self.layout.index is not None:
            records[INDEX_NAME] = self._upload(INDEX_NAME, self.layout.index)
        records |= {name: self._upload(name, self._files[name]) for name in _ENTRANCES if name in self._files}
        self._upload(MANIFEST_NAME, encode_manifest(self.layout, self.plan_hash, uploads.records, records, manifest))
        self._end()

    def _upload(self, name: str, data: bytes | Path) -> OtherFile:
        data = _contents(data) if isinstance(data, Path) else data
        self._lock.check()
        self._bucket.put(self.out.key(name), data)
        return OtherFile(len(data), hash_bytes(data))

    def _delete(self, name: str) -> None:
        self._lock.check()
        self._bucket.delete(self.out.key(name))

    @property
    def is_open(self) -> bool:
        """False once it is published, closed or discarded."""
        return self._lock.held

    def discard(self) -> None:
        """Discard everything that is uploaded. The output is not touched."""
        self._opened()
        self._end(uploads=True)
        if self._products is not None:
            self._products.discard()

    def _end(self, *, uploads: bool = False) -> None:
        """Remove the journal and the lock. uploads: abort them too."""
        self._opened().close(save=False)
        self._uploads = None
        self._lock.check()
        end = discard if uploads else discard_empty
        end(self._bucket, self.out, self._state.uploads)
        self._bucket.delete(self._journal)
        self._lock.release()

    def close(self) -> None:
        """End the threads and release the lock; what is uploaded stays, and `open` resumes it. May be called twice."""
        if self._uploads is not None:
            self._uploads.close()
            self._uploads = None
        self._lock.release()
        if self._products is not None:
            self._products.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _contents(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except WeightsmithError as error:
        raise StoreError(error.finding.what, where=str(path), fix=error.finding.fix) from error
