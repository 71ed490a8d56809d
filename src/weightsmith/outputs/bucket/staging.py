"""A checkpoint being built in a bucket: `store.Staging` for outputs that are uploaded while they are computed.

    models/
      out/                              nothing, or the checkpoint that will be replaced; parts of uploads are not visible
      .out.weightsmith-staging/
        lock                            held by the process that builds the output (`outputs.bucket.lock`)
        journal                         what is uploaded (`outputs.bucket.journal`)
        parts/journal                   what was uploaded before other processes began to build parts for it, and later products
        parts/journal-2-of-8            what one of them has uploaded
        products/                       values that these processes need before some tensors (`outputs.bucket.products`)

An object store has no rename. Nothing under the output changes until everything is uploaded. Then the files appear in an order
in which no reader takes part of them for a model: config.json and the index after the weights, and after old weights of other
names are deleted; the manifest last. If publishing was cut off, the next run completes it. Products are kept in a staging
folder of this machine; other processes get them from the bucket.

Processes that build parts share nothing but the bucket. Each takes the uploads from a journal of the process that holds the
lock, and ends soon after that one. No two parts have bytes of the same part of an upload (`together`). A process that is taken
for lost, and is not, does no harm: what it uploads has the same bytes, or is found (`Uploads.confirm`) or refused when the
uploads are completed. After that they are gone, and it can change nothing.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from weightsmith.containers import Layout, make_layout
from weightsmith.containers.safetensors import INDEX_NAME
from weightsmith.errors import NOTHING_WRITTEN, Finding, StoreError, WeightsmithError
from weightsmith.formats.files import open_regular
from weightsmith.outputs.bucket.client import UPLOADS, Bucket
from weightsmith.outputs.bucket.contents import check_vacant, is_published, marked
from weightsmith.outputs.bucket.journal import CHECKSUM, FollowedParts, State, read_state
from weightsmith.outputs.bucket.lock import Led, Lock
from weightsmith.outputs.bucket.parts import cut
from weightsmith.outputs.bucket.prefix import Prefix
from weightsmith.outputs.bucket.products import get_product, put_product
from weightsmith.outputs.bucket.stores import open_bucket
from weightsmith.outputs.bucket.uploads import Uploads, discard
from weightsmith.outputs.checksum import byte_view, hash_bytes
from weightsmith.outputs.journal import Built, Finished
from weightsmith.outputs.local.area import left_behind
from weightsmith.outputs.local.target import check_file_name
from weightsmith.outputs.manifest import MANIFEST_NAME, OtherFile, encode_manifest
from weightsmith.outputs.resume import is_resumable, layout_hash
from weightsmith.outputs.staging import Staging
from weightsmith.remote.spool import spool_folder

if TYPE_CHECKING:
    from weightsmith.formats.files import Extent
    from weightsmith.outputs.checksum import BytesLike
    from weightsmith.outputs.local.products import Arrays
    from weightsmith.plans import Product

JOURNAL, LOCK, PARTS, PRODUCTS = "journal", "lock", "parts", "products"
_ENTRANCES = (INDEX_NAME, "config.json", "adapter_config.json")
"""Files that loaders read first: written after all others, but for the manifest."""


class BucketStaging:
    """A checkpoint being built in a bucket; see `store.Staging`, whose methods it has.

    out        the address of the output
    folder     the address, for messages
    layout     where every byte goes
    plan_hash  identity of the plan; only work of the same plan is resumed
    """

    def __init__(
        self,
        out: Prefix,
        layout: Layout,
        plan_hash: str,
        overwrite: bool,
        reads: Sequence[str],
        part: str,
        names: Set[str] | None,
    ) -> None:
        """Use `BucketStaging.open`."""
        self.out, self.layout, self.plan_hash = out, layout, plan_hash
        self.folder = str(out)
        self._overwrite, self._reads = overwrite, tuple(reads)
        self._bucket = open_bucket(out)
        self._lock = (Led if part else Lock)(self._bucket, f"{out.staging}/{LOCK}", str(out))
        self._part, self._names = part, names
        self._journal = f"{out.staging}/{PARTS}/{JOURNAL}-{part}" if part else f"{out.staging}/{JOURNAL}"
        self._state = State(plan_hash, layout_hash(layout), {}, secrets.token_hex(16))
        self._before: State | None = None
        self._uploads: Uploads | None = None
        self._files: dict[str, bytes | Path] = {}
        self._products: Staging | None = None
        self._resume = True
        self._left: tuple[Finding, ...] = ()
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
        part: str = "",
        names: Set[str] | None = None,
    ) -> BucketStaging:
        """Take the lock, find what an interrupted run has uploaded, and begin the other uploads.

        reads  what the run reads, as the user names it: never replaced
        part   label: build one part for the process that holds the lock; "": build everything
        names  the tensors that this process builds, at first: of the part, or none; None: all

        Everything else is as for `store.Staging.open`. Raises OutputExists, CannotResume, Busy, and StoreError for a store that
        cannot be used.
        """
        staging = cls(out, layout, plan_hash, overwrite, reads, part, names)
        try:
            if part:
                staging._join(facts)
            else:
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
                self._absorb(ours_in(self._bucket, f"{self.out.staging}/{PARTS}/"))
            else:
                unwanted = state.uploads
                left = [name for names in state.publishing or () for name in names]
                if left and not is_published(self._bucket, self.out, state.plan):
                    self._state.publishing = (), tuple(left)
        self._check_vacant()
        if unwanted:
            discard(self._bucket, self.out, unwanted)
        self._begin(None)
        discard_parts(self._bucket, self.out, products=self._state.products)  # they are in the journal now
        if self._names is None:
            self._opened().write_headers()

    def _join(self, facts: Mapping[str, str]) -> None:
        """Build a part in the uploads of the process that holds the lock."""
        self._lock.take()
        found = read_state(self._bucket, self._shared_journal)
        if found is None or (found.state.plan, found.state.layout) != (self.plan_hash, self._state.layout):
            what = "another run has taken the unfinished work, or published it"
            raise StoreError(what, where=self.folder, fix="run again", state=NOTHING_WRITTEN)
        self._state = found.state
        self._state.facts = facts
        self._absorb([self._journal])
        self._begin(self._names)
        self._opened().write_headers()

    def _absorb(self, journals: Iterable[str]) -> None:
        """Enter what is in the journals of parts."""
        with ThreadPoolExecutor(UPLOADS) as pool:
            for found in pool.map(partial(read_state, self._bucket), journals):
                if found is not None and found.state.is_same_work(self._state):
                    self._state.absorb(found.state)

    def _begin(self, names: Set[str] | None) -> None:
        self._uploads = Uploads(self._bucket, self.out, self.layout, self._state, self._lock, self._journal, names)

    def _check_vacant(self, state: str = NOTHING_WRITTEN) -> tuple[str, ...]:
        """The names that will be replaced."""
        written = {name for names in self._state.publishing or () for name in names}
        ours = marked(self._bucket, self.out, written)
        try:
            return check_vacant(self._bucket, self.out, overwrite=self._overwrite, reads=self._reads, ours=ours)
        except StoreError as error:
            error.state = error.state and state
            raise

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What the user should know."""
        return self._lock.warnings + (() if self._products is None else self._products.warnings) + self._left

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

    # parts that other processes build

    def hand_over(self) -> Built:
        """Wait until everything that was written is uploaded: what this process, which builds a part, has finished."""
        with self._kept():
            self._opened().drain()
        return Built(self._state.tensors, self._state.products, {(*key,): etags for key, etags in self._state.groups.items()})

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let other processes build parts meanwhile; `adopt` what they have finished."""
        with self._kept():
            self._share_journal()
        yield
        with self._kept():
            self._opened().confirm()
            self._opened().write_headers()

    def adopt(self, built: Built) -> None:
        """Take over what a process that built a part has finished."""
        with self._kept():
            if self._opened().adopt(built):
                self._share_journal()

    @property
    def _shared_journal(self) -> str:
        return f"{self.out.staging}/{PARTS}/{JOURNAL}"

    def _share_journal(self) -> None:
        """Write what processes that build parts begin with: a small object, that each of them reads for each part."""
        if self._before is None:
            read_state(self._bucket, self._shared_journal)  # raises for what is not ours
            self._before = replace(self._state, groups={**self._state.groups}, tensors={**self._state.tensors})
        self._bucket.put(self._shared_journal, replace(self._before, products=self._state.products).encode())

    def followed(self) -> FollowedParts:
        """What other processes finish while they build parts."""
        return FollowedParts(self._bucket, f"{self.out.staging}/{PARTS}/{JOURNAL}-")

    def reread(self, names: Collection[str], threads: int) -> None:
        """Does nothing: no process has written a byte of another's."""

    def redo(self, names: Collection[str]) -> bool:
        """These finished tensors are computed again, and all others of their groups. True if there are others."""
        with self._kept():
            before = len(self.records)
            self._opened().redo(names)
            return before - len(self.records) > len(names)

    # tensors

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
                folder = spool_folder() if self._part else Path()
                self._products = Staging.open(
                    folder / f"{self.out.local_name}.products{self._part and f'-{self._part}'}",
                    make_layout([], 1),
                    self.plan_hash,
                    facts=self._state.facts,
                    resume=self._resume,
                )
            return self._products

    @property
    def products(self) -> dict[str, str]:
        """See `store.Staging.products`; before the first one is asked for, those in the bucket."""
        return {**({} if self._products is None else self._products.products), **self._state.products}

    def product(self, product: Product) -> Arrays | None:
        """See `store.Staging.product`."""
        local, wanted = self._local(), self._state.products.get(product.name)
        if wanted is None or local.products.get(product.name) == wanted:
            return local.product(product)
        arrays = local.create(product) or [np.zeros(out.shape, out.dtype.numpy) for out in product.outs]
        if not get_product(self._bucket, self._product_prefix, product.name, arrays, wanted):
            del self._state.products[product.name]
            return None
        return local.keep(product, arrays)

    @property
    def _product_prefix(self) -> str:
        return f"{self.out.staging}/{PRODUCTS}"

    def create(self, product: Product) -> Arrays | None:
        """See `store.Staging.create`."""
        return self._local().create(product)

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """See `store.Staging.keep`. If other processes build parts, they get it from the bucket."""
        with self._kept():
            if self._names is not None and not product.transient:
                self._state.products[product.name] = put_product(
                    self._bucket, self._product_prefix, product.name, arrays, self._state.token
                )
                self._opened().save()
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
        try:
            self._end()
            if self._products is not None:
                self._products.discard()
        except (OSError, StoreError) as error:
            self._left = (left_behind(error, self.folder, f"run: weightsmith clean {self.out} --yes"),)
        return self.out

    def _publish(self, uploads: Uploads, there: Sequence[str], manifest: Mapping[str, Any]) -> None:
        assert isinstance(self._lock, Lock), "a part is not published"
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

    def _upload(self, name: str, data: bytes | Path) -> OtherFile:
        data = _contents(data) if isinstance(data, Path) else data
        self._lock.check()
        self._bucket.put(self.out.key(name), data, self._state.token)
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
        if uploads:
            discard(self._bucket, self.out, self._state.uploads)
        discard_parts(self._bucket, self.out)
        self._bucket.delete(self._journal)
        self._lock.release()

    def close(self) -> None:
        """End the threads and release the lock; what is uploaded stays, and `open` resumes it. May be called twice."""
        if self._uploads is not None:
            self._uploads.close()
            self._uploads = None
        self._lock.release()
        if self._products is not None:
            if self._part and self._products.is_open:
                self._products.discard()
            self._products.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def discard_parts(bucket: Bucket, address: Prefix, products: Collection[str] = ()) -> None:
    """Remove the journals of parts, and the products unless there are some to keep. What is not ours stays."""
    keys = ours_in(bucket, *(f"{address.staging}/{folder}/" for folder in ((PARTS,) if products else (PARTS, PRODUCTS))))
    with ThreadPoolExecutor(UPLOADS) as pool:
        for _ in pool.map(bucket.delete, keys):
            pass


def ours_in(bucket: Bucket, *prefixes: str) -> list[str]:
    """The keys of the journals and products under prefixes of a staging prefix that weightsmith has written."""

    def is_ours(key: str) -> bool:
        try:
            if key.rpartition("/")[0].endswith(f"/{PARTS}"):
                return read_state(bucket, key) is not None
        except StoreError:
            return False
        found = bucket.head(key)
        return found is not None and bool(found.token)

    keys = [key for prefix in prefixes for key, _ in bucket.names(prefix)]
    with ThreadPoolExecutor(UPLOADS) as pool:
        return [key for key, ours in zip(keys, pool.map(is_ours, keys), strict=True) if ours]


def together(out: Prefix, layout: Layout) -> list[tuple[str, ...]]:
    """Sets of tensors, each of which one process must build: see `plans.parts`."""
    return [group.tensors for group in cut(layout, equal=open_bucket(out).equal_parts)]


def _contents(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except WeightsmithError as error:
        raise StoreError(error.finding.what, where=str(path), fix=error.finding.fix) from error
