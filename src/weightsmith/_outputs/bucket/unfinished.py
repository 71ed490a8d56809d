"""Finds, describes and removes the work of interrupted runs in a bucket."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from weightsmith._base.errors import StoreError
from weightsmith._outputs.bucket.backend import JOURNAL, LOCK, discard_parts
from weightsmith._outputs.bucket.client import Bucket, not_ours
from weightsmith._outputs.bucket.contents import check_vacant, is_published, marked, open_bucket
from weightsmith._outputs.bucket.journal import State, read_state
from weightsmith._outputs.bucket.lock import Lock, is_held, is_lock
from weightsmith._outputs.bucket.prefix import Prefix
from weightsmith._outputs.bucket.uploads import discard
from weightsmith._outputs.local.area import STAGING_SUFFIX
from weightsmith.abc.output import Unfinished


def find_uploads(address: Prefix) -> Iterator[Unfinished]:
    """The unfinished work for this output, and for outputs directly under it. Nothing is changed."""
    bucket = open_bucket(address)
    outs = [address] if address.prefix else []
    for prefix in bucket.folders(address.key(".")):
        name = prefix.rstrip("/").rpartition("/")[2]
        if name.endswith(STAGING_SUFFIX):
            outs.append(replace(address, prefix=address.key(name[1:].removesuffix(STAGING_SUFFIX))))
    for out in outs:
        folder, remove = out.shown(out.staging), partial(_remove, out)
        lock = bucket.read(f"{out.staging}/{LOCK}", 1 << 16)
        try:
            found = read_state(bucket, f"{out.staging}/{JOURNAL}")
            if lock is not None and not is_lock(lock):
                raise not_ours(f"{out.staging}/{LOCK}")
        except StoreError as error:
            yield Unfinished(out, folder, 0, 0, time.time(), error.finding.what, remove)
            continue
        if lock is None and found is None:
            continue
        age = next(each.age_seconds for each in (found, lock) if each is not None)
        state = found.state if found is not None else State()
        nbytes = sum(
            size for file, upload in state.uploads.items() for _, size in (bucket.parts(out.key(file), upload) or {}).values()
        )
        reason = "a process is working on it" if lock is not None and is_held(lock) else _half_published(bucket, out, state)
        yield Unfinished(out, folder, len(state.tensors), nbytes, time.time() - age, reason, remove)


def _remove(out: Prefix) -> None:
    """Abort the uploads, and remove journal and lock. Raises Busy if a process works on it."""
    bucket = open_bucket(out)
    lock = Lock(bucket, f"{out.staging}/{LOCK}", str(out))
    lock.take()
    try:
        journal = read_state(bucket, f"{out.staging}/{JOURNAL}")
        if journal is None:
            return
        if reason := _half_published(bucket, out, journal.state):
            raise StoreError(f"not removed: {reason}", where=str(out), fix="run the same command again")
        discard(bucket, out, journal.state.uploads)
        discard_parts(bucket, out)
        bucket.delete(f"{out.staging}/{JOURNAL}")
    finally:
        lock.release()


def _half_published(bucket: Bucket, out: Prefix, state: State) -> str:
    """Why the work must not be removed: some of its files are visible. "" otherwise."""
    if state.publishing is None or is_published(bucket, out, state.plan):
        return ""
    return "it was interrupted while it was published; the same command completes it"


def check_free(address: Prefix, *, overwrite: bool, reads: Sequence[str]) -> None:
    """Raise as `Staging.open` will if the output cannot be written. Changes nothing."""
    bucket = open_bucket(address)
    found = read_state(bucket, f"{address.staging}/{JOURNAL}")
    written = {name for names in (found.state.publishing or () if found is not None else ()) for name in names}
    check_vacant(bucket, address, overwrite=overwrite, reads=reads, ours=marked(bucket, address, written))
