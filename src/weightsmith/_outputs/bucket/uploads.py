"""The weight files of an output: tiles go in, in any order, and parts are uploaded as soon as all of their bytes are there.

A few threads upload. Full parts that wait for them are bounded in number, and then `write` waits, so a computation that is
faster than the network is slowed down to it.

What an interrupted run has uploaded is used in two ways. A group in the journal, whose parts the store still lists, is
finished: its tensors are not computed again. Other parts are computed again, and uploaded only if the store lists another MD5
or none. So what another machine computes differently replaces what was there, and bytes of two computations are never mixed:
a file is completed with the ETags of the parts, and a store that has others refuses.

Several processes may upload to the same uploads, each its own groups. One has begun the uploads and completes them; the others
give it their ETags (`adopt`). If two upload the same group, the later parts count: they have the same bytes, or are uploaded
again (`confirm`).

A part whose bytes are a run of an object in the same store is copied there, and uploaded if the copy has another MD5.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from weightsmith._base.errors import StoreError
from weightsmith._base.files import Extent, RemoteBytes
from weightsmith._files.containers import Layout
from weightsmith._files.remote.ahead import Spool, spool_folder
from weightsmith._files.remote.folder import RemoteFile
from weightsmith._outputs.bucket.client import UPLOADS, Bucket, Run, etag_of, md5_of
from weightsmith._outputs.bucket.journal import State
from weightsmith._outputs.bucket.lock import LeaderLock, Lock
from weightsmith._outputs.bucket.parts import Group, GroupKey, Part, cut
from weightsmith._outputs.bucket.prefix import Prefix
from weightsmith.abc.output import Built, Finished, Progress

WAITING = 2 * UPLOADS
"""Full parts that are uploaded or wait to be."""
SAVE_SECONDS = 5.0


class _Open:
    """A part that is being filled or uploaded.

    slot     of the spool; -1 while it has none
    missing  bytes that are not written yet
    run      what it may be copied from; equal: how many of its bytes are known to be those of the run
    etag     "" until it is uploaded
    """

    __slots__ = ("equal", "etag", "group", "missing", "part", "run", "slot")

    def __init__(self, part: Part, group: _Progress) -> None:
        self.part, self.group = part, group
        self.slot, self.missing, self.etag = -1, part.filled, ""
        self.run: Run | None = None
        self.equal = 0


class _Progress:
    """A group. taken: an earlier run or another process has finished it."""

    __slots__ = ("group", "parts", "taken")

    def __init__(self, group: Group) -> None:
        self.group, self.taken = group, False
        self.parts = [_Open(part, self) for part in group.parts]


class Uploads:
    """The weight files of an output. `write` and `finish` are thread-safe; `close` may be called twice."""

    def __init__(
        self,
        bucket: Bucket,
        address: Prefix,
        layout: Layout,
        state: State,
        lock: Lock | LeaderLock,
        journal: str,
        names: Set[str] | None = None,
    ) -> None:
        """Find out what is uploaded, begin the other uploads, and write the journal to this key.

        names  build only the groups of these tensors, in uploads that another process has begun; None: everything
        """
        self._bucket, self._address, self._layout, self._state, self._lock = bucket, address, layout, state, lock
        self._journal = journal
        groups = cut(layout, equal=bucket.equal_parts)
        self._groups = [_Progress(group) for group in groups if names is None or not names.isdisjoint(group.tensors)]
        self._group_of = {name: progress for progress in self._groups for name in progress.group.tensors}
        self._parts: list[list[_Open]] = [[] for _ in layout.shards]
        for progress in self._groups:
            self._parts[progress.group.shard] += progress.parts
        self._starts = [[each.part.start for each in parts] for parts in self._parts]
        self._listed: list[dict[int, tuple[str, int]]] = [{} for _ in layout.shards]
        self._completed: set[int] = set()
        self._finished: dict[str, Finished] = {}
        self._mutex = threading.Lock()
        self._saving = threading.Lock()
        self._saved, self._save_seconds = 0.0, SAVE_SECONDS
        self._error: BaseException | None = None
        self._closed = False
        self._room = threading.Semaphore(WAITING)
        self._find(begin=names is None)
        self.save()
        self._spool = Spool(max((each.part.nbytes for parts in self._parts for each in parts), default=1), spool_folder())
        self._pool = ThreadPoolExecutor(UPLOADS, "weightsmith-upload")

    def _find(self, *, begin: bool) -> None:
        """What is uploaded already: enter it, and leave only that in the state."""
        state, old = self._state, replace(self._state)
        state.uploads, state.groups, state.tensors = {}, {}, {}
        for number, shard in enumerate(self._layout.shards):
            own = [each.group for each in self._parts[number] if each is each.group.parts[0]]
            if not own:
                continue
            known = [old.groups.get(progress.group.key(shard.name), ()) for progress in own]
            key, upload = self._address.key(shard.name), old.uploads.get(shard.name, "")
            listed = self._bucket.parts(key, upload) if upload else None
            if upload and listed is None and all(known) and self._is_complete(number):
                self._completed.add(number)
                whole = zip(own, known, strict=True)
                listed = {p.number: (e, p.nbytes) for g, etags in whole for p, e in zip(g.group.parts, etags, strict=False)}
            elif listed is None:
                if not begin:
                    raise self._discarded(shard.name)
                upload = self._bucket.begin(key, state.token)
            state.uploads[shard.name] = upload
            self._listed[number] = listed or {}
            for progress, etags in zip(own, known, strict=True):
                names, parts = progress.group.tensors, progress.group.parts
                there = [self._listed[number].get(part.number) for part in parts]
                if len(etags) != len(parts) or there != [(etag, part.nbytes) for etag, part in zip(etags, parts, strict=True)]:
                    continue
                if not all(name in old.tensors for name in names):
                    continue
                self._take(progress, etags)
                state.groups[progress.group.key(shard.name)] = etags
                state.tensors |= {name: old.tensors[name] for name in names}
        self._finished = dict(state.tensors)

    def _discarded(self, file: str) -> StoreError:
        where = self._address.shown(self._address.key(file))
        return StoreError("the upload was discarded by someone else", where=where, fix="run again")

    def _is_complete(self, number: int) -> bool:
        """This work has completed the upload of a file."""
        shard = self._layout.shards[number]
        head = self._bucket.head(self._address.key(shard.name))
        return head is not None and head.token == self._state.token and head.nbytes == shard.nbytes

    def write_headers(self) -> None:
        """Write what precedes the tensors of each file, for parts that are not uploaded."""
        self._write_headers(self._groups)

    def _write_headers(self, groups: Iterable[_Progress]) -> None:
        for progress in groups:
            if progress.group.header and not progress.taken:
                self._put(progress.group.shard, 0, memoryview(self._layout.shards[progress.group.shard].header))

    # what others have uploaded

    def adopt(self, built: Built) -> bool:
        """Enter what another process has finished; True if there are new products. The journal may be written.

        Raises StoreError for groups of another cut.
        """
        with self._mutex:
            for key, etags in built.groups.items():
                progress = self._by_key.get(GroupKey(*key))
                if progress is None or len(progress.parts) != len(etags):
                    what = "a worker has cut the weight files into other parts than this process"
                    fix = "give all machines the same AWS_ENDPOINT_URL and WEIGHTSMITH_EQUAL_PARTS"
                    raise StoreError(what, where=str(self._address), fix=fix)
                self._take(progress, etags)
                self._state.groups[GroupKey(*key)] = etags
            self._state.tensors |= built.tensors
            self._finished |= built.tensors
            new = not built.products.items() <= self._state.products.items()
            self._state.products |= built.products
        if new or time.monotonic() - self._saved > self._save_seconds:
            self.save()
        return new

    @cached_property
    def _by_key(self) -> dict[GroupKey, _Progress]:
        return {progress.group.key(self._layout.shards[progress.group.shard].name): progress for progress in self._groups}

    def _take(self, progress: _Progress, etags: Sequence[str]) -> None:
        """This group is finished."""
        progress.taken = True
        for each, etag in zip(progress.parts, etags, strict=True):
            each.etag, each.missing = etag, 0

    def confirm(self) -> None:
        """Give up groups that others have uploaded once more since they were adopted: a worker that was taken for lost."""
        for number, shard in enumerate(self._layout.shards):
            if number in self._completed:
                continue
            key, upload = self._address.key(shard.name), self._state.uploads[shard.name]
            self._listed[number] = listed = self._bucket.parts(key, upload) or {}
            for each in self._parts[number]:
                if each.group.taken and listed.get(each.part.number) != (each.etag, each.part.nbytes):
                    self._give_up(each.group)

    def redo(self, names: Collection[str]) -> None:
        """These finished tensors are computed again, and all others of their groups: none of them is finished now."""
        again = list({id(progress): progress for name in names for progress in (self._group_of[name],)}.values())
        for progress in again:
            self._give_up(progress)
        self._write_headers(again)

    def _give_up(self, progress: _Progress) -> None:
        with self._mutex:
            progress.taken = False
            self._state.groups.pop(progress.group.key(self._layout.shards[progress.group.shard].name), None)
            for name in progress.group.tensors:
                self._state.tensors.pop(name, None)
                self._finished.pop(name, None)
            for each in progress.parts:
                each.etag, each.missing = "", each.part.filled

    # tensors

    @property
    def records(self) -> dict[str, Finished]:
        """The finished tensors. A snapshot."""
        with self._mutex:
            return dict(self._finished)

    def location(self, name: str) -> None:
        """They are in no file."""

    def write(self, name: str, start_byte: int, view: memoryview) -> None:
        """Write part of a tensor, every byte once. Waits while too many parts wait. Raises StoreError, NoSpace."""
        place = self._layout.places[name]
        self.check()
        if self._group_of[name].taken:
            raise ValueError(f"{name} is finished: `redo` comes first")
        self._put(place.shard, place.offset + start_byte, view)

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """These bytes, which are about to be written, are a run of an object: a part may be copied from it in the store."""
        found, place = object_of(extent.file, self._address.scheme), self._layout.places[name]
        if found is None:
            return
        first, end, starts = place.offset + start_byte, place.offset + start_byte + extent.nbytes, self._starts[place.shard]
        for each in self._parts[place.shard][bisect_right(starts, first) - 1 : bisect_left(starts, end)]:
            run = Run(*found, extent.offset - first + each.part.start)
            inside = min(end, each.part.start + each.part.nbytes) - max(first, each.part.start)
            with self._mutex:
                each.run = each.run or run
                each.equal += inside if each.run == run else 0

    def _put(self, shard: int, offset: int, view: memoryview) -> None:
        i = bisect_right(self._starts[shard], offset) - 1
        while view.nbytes:
            each = self._parts[shard][i]
            start = offset - each.part.start
            piece = view[: each.part.nbytes - start]
            self._fill(each, start, piece)
            view, offset, i = view[piece.nbytes :], offset + piece.nbytes, i + 1

    def _fill(self, each: _Open, start: int, piece: memoryview) -> None:
        with self._mutex:
            if each.slot < 0:
                each.slot = self._spool.take()
                if each.part.filled < each.part.nbytes:  # padding
                    self._spool.write(each.slot, 0, memoryview(bytes(each.part.nbytes)))
        self._spool.write(each.slot, start, piece)
        with self._mutex:
            each.missing -= piece.nbytes
            assert each.missing >= 0, f"bytes of part {each.part.number} were written twice"
            full = each.missing == 0
        if full:
            while not self._room.acquire(timeout=0.5):
                self.check()
            self._pool.submit(self._upload, each)

    def finish(self, name: str, done: Finished) -> None:
        """All bytes of a tensor are written."""
        with self._mutex:
            self._finished[name] = done
        self._close_group(self._group_of[name])

    # uploading

    def _upload(self, each: _Open) -> None:
        """The work of a thread of the pool."""
        try:
            if self._closed or self._error is not None:
                return
            shard, part = each.group.group.shard, each.part
            data = bytearray(part.nbytes)
            self._spool.read(each.slot, 0, memoryview(data))
            md5 = md5_of(data)
            etag = etag_of(md5)
            if self._listed[shard].get(part.number) != (etag, part.nbytes):
                file = self._layout.shards[shard].name
                key, upload = self._address.key(file), self._state.uploads[file]
                run = each.run if each.equal == part.nbytes else None
                if run is None or self._bucket.copy(key, upload, part.number, run, part.nbytes, md5) != etag:
                    etag = self._bucket.upload(key, upload, part.number, data, md5)
            self._spool.give_back(each.slot)
            with self._mutex:
                each.etag = etag
            self._close_group(each.group)
        except BaseException as error:
            with self._mutex:
                self._error = self._error or error
        finally:
            self._room.release()

    def _close_group(self, progress: _Progress) -> None:
        """Enter a group in the journal once all of it is uploaded and finished."""
        group = progress.group
        with self._mutex:
            uploaded = all(each.etag for each in progress.parts)
            if progress.taken or not uploaded or not all(name in self._finished for name in group.tensors):
                return
            file = self._layout.shards[group.shard].name
            self._state.groups[group.key(file)] = tuple(each.etag for each in progress.parts)
            self._state.tensors |= {name: self._finished[name] for name in group.tensors}
            late = time.monotonic() - self._saved > self._save_seconds
        if late and self._saving.acquire(blocking=False):
            try:
                self._save()
            finally:
                self._saving.release()

    def save(self) -> None:
        """Write the journal."""
        with self._saving:
            self._save()

    def _save(self) -> None:
        began = time.monotonic()
        with self._mutex:
            data = self._state.encode()
        self._save_seconds = max(SAVE_SECONDS, 20 * (time.monotonic() - began))  # a journal of 100,000 tensors is long
        self._lock.check()
        self._bucket.put(self._journal, data)
        self._saved = time.monotonic()

    def check(self) -> None:
        """Raise what has failed in a thread that uploads; ValueError once it is closed."""
        if self._closed:
            raise ValueError(f"{self._address}: this output is closed")
        if self._error is not None:
            raise self._error
        self._lock.check()

    # the end

    def drain(self, progress: Progress | None = None) -> None:
        """Wait until everything written is uploaded. Nothing may be written afterwards."""
        self._pool.shutdown(wait=True)
        self.check()

    def problems(self) -> list[str]:
        """What is missing."""
        return [
            f"part {each.part.number} of {self._layout.shards[number].name} is not uploaded"
            for number, parts in enumerate(self._parts)
            for each in parts
            if not each.etag
        ]

    def complete(self) -> None:
        """Make objects of the parts. From now on, the weight files can be read."""
        for number, shard in enumerate(self._layout.shards):
            if number in self._completed:
                continue
            key, etags = self._address.key(shard.name), [each.etag for each in self._parts[number]]
            self._lock.check()
            if not self._bucket.complete(key, self._state.uploads[shard.name], etags) and not self._is_complete(number):
                raise self._discarded(shard.name)
            self._completed.add(number)

    def abandon(self) -> None:
        """Threads that wait look for errors themselves."""

    def close(self, *, save: bool = True) -> None:
        """End the threads after their current part; uploaded parts stay in the store. save: write the journal, if possible."""
        if self._closed:
            return
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        if save:
            with suppress(StoreError):  # without it, the parts are compared one by one
                self.save()


def object_of(file: RemoteBytes, scheme: str) -> tuple[str, str, str] | None:
    """Bucket, key and ETag of a file in a store of this kind; None for any other."""
    if not isinstance(file, RemoteFile):
        return None
    found, _, rest = file.ranges.where.partition("://")
    bucket, _, key = rest.partition("/")
    return (bucket, key, file.version) if found == scheme and file.version else None


def discard(bucket: Bucket, address: Prefix, uploads: Mapping[str, str]) -> None:
    """Abort uploads. uploads: weight file → id."""
    for file, upload in uploads.items():
        bucket.abort(address.key(file), upload)
