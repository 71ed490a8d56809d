"""A checkpoint being built in a bucket, which is uploaded while it is computed.

    models/
      out/                              nothing, or the checkpoint that will be replaced; parts of uploads are not visible
      .out.weightsmith-staging/
        lock                            held by the process that builds the output (`bucket.lock`)
        journal                         what is uploaded (`bucket.journal`)
        parts/journal                   what was uploaded before other processes began to build parts for it, and later products
        parts/journal-2-of-8            what one of them has uploaded
        products/                       values that these processes need before some tensors (`bucket.products`)

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weightsmith._base.errors import NOTHING_WRITTEN, Finding, StoreError
from weightsmith._files.containers import Layout, make_layout
from weightsmith._files.remote.ahead import spool_folder
from weightsmith._outputs.bucket.client import UPLOADS, Bucket
from weightsmith._outputs.bucket.contents import check_vacant, is_published, marked, open_bucket
from weightsmith._outputs.bucket.journal import FollowedParts, State, read_state
from weightsmith._outputs.bucket.lock import LeaderLock, Lock
from weightsmith._outputs.bucket.parts import cut
from weightsmith._outputs.bucket.prefix import CAPABILITIES, Prefix
from weightsmith._outputs.bucket.products import get_product, put_product
from weightsmith._outputs.bucket.uploads import Uploads, discard
from weightsmith._outputs.checksum import byte_view, hash_bytes
from weightsmith._outputs.journal import is_resumable, layout_hash
from weightsmith._outputs.local.area import left_behind
from weightsmith._outputs.local.backend import FolderBackend
from weightsmith._outputs.local.other_files import open_source, read_source
from weightsmith._outputs.local.rename import Rename
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._outputs.staging import Staging
from weightsmith.abc.output import Built, Finished, OtherFile, OutputSpec, Progress

if TYPE_CHECKING:
    from weightsmith._plans import Product
    from weightsmith.abc.output import Arrays, BytesLike

JOURNAL, LOCK, PARTS, PRODUCTS = "journal", "lock", "parts", "products"
_ENTRANCES = ("config.json", "adapter_config.json")
"""Files that loaders read first: written after all others, but for the manifest."""


class BucketBackend:
    """See `OutputBackend`.

    out, folder  the address of the output
    lock         held while this is open
    state        what is in the journal
    """

    capabilities = CAPABILITIES

    def __init__(self, out: Prefix, spec: OutputSpec) -> None:
        """Send nothing. Raises StoreError without the library of the store."""
        self.out, self.folder, self.spec = out, str(out), spec
        self._bucket = open_bucket(out)
        self.lock = (LeaderLock if spec.part else Lock)(self._bucket, f"{out.staging}/{LOCK}", str(out))
        self._journal = f"{out.staging}/{PARTS}/{JOURNAL}-{spec.part}" if spec.part else f"{out.staging}/{JOURNAL}"
        self.state = State(spec.plan_hash, layout_hash(spec.layout), dict(spec.facts), token=secrets.token_hex(16))
        self._before: State | None = None
        self._uploads: Uploads | None = None
        self._files: dict[str, bytes | Path] = {}
        self._local: Staging | None = None
        self._left: tuple[Finding, ...] = ()
        self._mutex = threading.Lock()

    @property
    def disk(self) -> Path:
        """See `OutputBackend`."""
        return spool_folder()

    @property
    def weights(self) -> Uploads:
        """See `OutputBackend`."""
        if self._uploads is None:
            raise ValueError(f"{self.out}: this output is closed")
        return self._uploads

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """See `OutputBackend`."""
        return self.lock.warnings + (() if self._local is None else self._local.warnings) + self._left

    @property
    def kept(self) -> str:
        """See `OutputBackend`."""
        return f"Uploaded parts are kept at {self.out}; run again to resume."

    @property
    def is_open(self) -> bool:
        """See `OutputBackend`."""
        return self.lock.held

    # opening

    def open(self) -> None:
        """See `OutputBackend.open`; begins all uploads that are not begun."""
        self.lock.take()
        if self.spec.part:
            self._join()
        else:
            self._take()

    def _take(self) -> None:
        spec = self.spec
        found = read_state(self._bucket, self._journal)
        unwanted: Mapping[str, str] = {}
        if found is not None:
            state = found.state
            if spec.resume and is_resumable(state, spec.plan_hash, spec.layout, spec.facts, self.folder) and state.token:
                self.state = state
                self._absorb(ours_in(self._bucket, f"{self.out.staging}/{PARTS}/"))
            else:
                unwanted = state.uploads
                left = [name for names in state.publishing or () for name in names]
                if left and not is_published(self._bucket, self.out, state.plan):
                    self.state.publishing = (), tuple(left)
        self._check_vacant(NOTHING_WRITTEN)
        if unwanted:
            discard(self._bucket, self.out, unwanted)
        self._begin(None)
        discard_parts(self._bucket, self.out, products=self.state.products)  # they are in the journal now
        if spec.names is None:
            self.weights.write_headers()

    def _join(self) -> None:
        """Build a part in the uploads of the process that holds the lock."""
        found = read_state(self._bucket, self._shared_journal)
        if found is None or (found.state.plan, found.state.layout) != (self.spec.plan_hash, self.state.layout):
            what = "another run has taken the unfinished work, or published it"
            raise StoreError(what, where=self.folder, fix="run again", state=NOTHING_WRITTEN)
        self.state = found.state
        self.state.facts = dict(self.spec.facts)
        self._absorb([self._journal])
        self._begin(self.spec.names)
        self.weights.write_headers()

    def _absorb(self, journals: Iterable[str]) -> None:
        """Enter what is in the journals of parts."""
        with ThreadPoolExecutor(UPLOADS) as pool:
            for found in pool.map(partial(read_state, self._bucket), journals):
                if found is not None and found.state.is_same_work(self.state):
                    self.state.absorb(found.state)

    def _begin(self, names: Collection[str] | None) -> None:
        wanted = None if names is None else frozenset(names)
        self._uploads = Uploads(self._bucket, self.out, self.spec.layout, self.state, self.lock, self._journal, wanted)

    def _check_vacant(self, state: str) -> tuple[str, ...]:
        """The names that will be replaced."""
        written = {name for names in self.state.publishing or () for name in names}
        ours = marked(self._bucket, self.out, written)
        try:
            return check_vacant(self._bucket, self.out, overwrite=self.spec.overwrite, reads=self.spec.reads, ours=ours)
        except StoreError as error:
            error.state = error.state and state
            raise

    # tensors

    @property
    def records(self) -> dict[str, Finished]:
        """See `OutputBackend`."""
        return self.weights.records

    @property
    def holds_work(self) -> bool:
        """See `OutputBackend`."""
        return bool(self.records or self.products)

    def finish(self, name: str, done: Finished) -> None:
        """See `OutputBackend.finish`; in the journal once its group is uploaded."""
        self.weights.finish(name, done)

    def redo(self, names: Collection[str]) -> bool:
        """See `OutputBackend.redo`: all tensors of their groups are."""
        before = len(self.records)
        self.weights.redo(names)
        return before - len(self.records) > len(names)

    def reread(self, names: Collection[str], threads: int, progress: Progress | None) -> None:
        """See `OutputBackend.reread`: no process has written a byte of another's, and ETags were compared."""

    # parts that other processes build

    @contextmanager
    def only_process(self, waiting: Callable[[], None] | None) -> Iterator[None]:
        """See `Staging.only_process`: the driver has one process compute products."""
        yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """See `Staging.shared`."""
        self._share_journal()
        yield
        self.weights.confirm()
        self.weights.write_headers()

    def hand_over(self) -> Built:
        """See `Staging.hand_over`."""
        self.weights.drain(None)
        return Built(self.state.tensors, self.state.products, {(*key,): etags for key, etags in self.state.groups.items()})

    def adopt(self, built: Built) -> None:
        """See `Staging.adopt`."""
        if self.weights.adopt(built):
            self._share_journal()

    @property
    def _shared_journal(self) -> str:
        return f"{self.out.staging}/{PARTS}/{JOURNAL}"

    def _share_journal(self) -> None:
        """Write what processes that build parts begin with: a small object, that each of them reads for each part."""
        if self._before is None:
            read_state(self._bucket, self._shared_journal)  # raises for what is not ours
            self._before = replace(self.state, groups={**self.state.groups}, tensors={**self.state.tensors})
        self._bucket.put(self._shared_journal, replace(self._before, products=self.state.products).encode())

    def followed(self) -> FollowedParts:
        """See `Staging.followed`."""
        return FollowedParts(self._bucket, f"{self.out.staging}/{PARTS}/{JOURNAL}-")

    # products

    @property
    def local(self) -> Staging:
        """The staging folder of the products, on this machine."""
        with self._mutex:
            if self._local is None:
                part = self.spec.part
                name = f"{self.out.local.name}.products{part and f'-{part}'}"
                path = (spool_folder() if part else self.out.local.parent) / name
                resume = bool(part) or self.spec.resume
                own = OutputSpec(make_layout([], 1), self.spec.plan_hash, facts=self.state.facts, resume=resume)
                self._local = Staging.open(FolderBackend(path, own, Rename(path)), own)
            return self._local

    @property
    def products(self) -> dict[str, str]:
        """See `OutputBackend`; before the first one is asked for, those in the bucket."""
        return {**({} if self._local is None else self._local.products), **self.state.products}

    def product(self, product: Product) -> Arrays | None:
        """See `OutputBackend.product`."""
        local, wanted = self.local, self.state.products.get(product.name)
        if wanted is None or local.products.get(product.name) == wanted:
            return local.product(product)
        arrays = local.create(product) or [np.zeros(out.shape, out.dtype.numpy) for out in product.outs]
        if not get_product(self._bucket, self._product_prefix, product.name, arrays, wanted):
            del self.state.products[product.name]
            return None
        return local.keep(product, arrays)

    @property
    def _product_prefix(self) -> str:
        return f"{self.out.staging}/{PRODUCTS}"

    def create(self, product: Product) -> Arrays | None:
        """See `OutputBackend.create`."""
        return self.local.create(product)

    def keep(self, product: Product, arrays: Arrays) -> Arrays:
        """See `OutputBackend.keep`. If other processes build parts, they get it from the bucket."""
        if self.spec.names is not None and not product.transient:
            self.state.products[product.name] = put_product(
                self._bucket, self._product_prefix, product.name, arrays, self.state.token
            )
            self.weights.save()
        return self.local.keep(product, arrays)

    def forget(self, product: Product) -> None:
        """See `OutputBackend.forget`."""
        self.local.forget(product)

    # other files, and the end

    def add_file(self, name: str, data: BytesLike | Path) -> None:
        """See `OutputBackend.add_file`. It is uploaded by `publish`."""
        self._files[name] = data if isinstance(data, Path) else bytes(byte_view(data))

    def publish(self, manifest: Callable[[Mapping[str, OtherFile]], bytes], *, fsync: bool) -> Prefix:
        """See `OutputBackend.publish`: the other files, the weights, the index, the manifest."""
        there = self._check_vacant(f"Everything is uploaded to {self.out}, and not published")
        self._publish(there, manifest)
        try:
            self._end()
            if self._local is not None:
                self._local.discard()
        except (OSError, StoreError) as error:
            self._left = (left_behind(error, self.folder, f"run: weightsmith clean {self.out} --yes"),)
        return self.out

    def _publish(self, there: Sequence[str], manifest: Callable[[Mapping[str, OtherFile]], bytes]) -> None:
        assert isinstance(self.lock, Lock), "a part is not published"
        uploads, index = self.weights, self.spec.layout.index
        names = {MANIFEST_NAME, *self._files, *(shard.name for shard in self.spec.layout.shards)}
        names |= set() if index is None else {self.spec.layout.index_name}
        self.state.publishing = tuple(sorted(names)), tuple(sorted({*there, *(self.state.publishing or ((), ()))[1]} - names))
        self.lock.renew()
        uploads.save()
        indexes = [name for name in there if "/" not in name and name.endswith(".index.json")]
        for name in (MANIFEST_NAME, *indexes, *_ENTRANCES):  # a model without them is not taken for one while it is replaced
            if name in there:
                self._delete(name)
        records = {name: self._upload(name, data) for name, data in self._files.items() if name not in _ENTRANCES}
        uploads.complete()
        self.lock.renew()
        for name in self.state.publishing[1]:  # a loader that finds the new config.json must not find old weights with it
            self._delete(name)
        if index is not None:
            name = self.spec.layout.index_name
            records[name] = self._upload(name, index)
        records |= {name: self._upload(name, self._files[name]) for name in _ENTRANCES if name in self._files}
        self._upload(MANIFEST_NAME, manifest(records))

    def _upload(self, name: str, data: bytes | Path) -> OtherFile:
        if isinstance(data, Path):
            with open_source(data) as file:
                data = read_source(file, str(data), -1) or b""
        self.lock.check()
        self._bucket.put(self.out.key(name), data, self.state.token)
        return OtherFile(len(data), hash_bytes(data))

    def _delete(self, name: str) -> None:
        self.lock.check()
        self._bucket.delete(self.out.key(name))

    def discard(self) -> None:
        """See `OutputBackend.discard`: everything that is uploaded is gone."""
        self._end(uploads=True)
        if self._local is not None:
            self._local.discard()

    def _end(self, *, uploads: bool = False) -> None:
        """Remove the journal and the lock. uploads: abort them too."""
        self.weights.close(save=False)
        self._uploads = None
        self.lock.check()
        if uploads:
            discard(self._bucket, self.out, self.state.uploads)
        discard_parts(self._bucket, self.out)
        self._bucket.delete(self._journal)
        self.lock.release()

    def close(self) -> None:
        """See `OutputBackend.close`."""
        if self._uploads is not None:
            self._uploads.close()
            self._uploads = None
        self.lock.release()
        if self._local is not None:
            if self.spec.part and self._local.is_open:
                self._local.discard()
            self._local.close()


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
