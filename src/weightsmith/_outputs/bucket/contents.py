"""Objects under an address: their store, and which may be overwritten."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice

from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    CheckpointError,
    Corrupt,
    NotFound,
    StoreError,
    WeightsmithError,
)
from weightsmith._files.remote.addresses import Address, parse_address
from weightsmith._outputs.bucket.client import UPLOADS, Bucket
from weightsmith._outputs.bucket.prefix import Prefix
from weightsmith._outputs.compare import Read, check_ours, compare, differences
from weightsmith._outputs.local.target import is_address, occupied
from weightsmith._outputs.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, decode_manifest
from weightsmith.abc.output import Progress, Verified

_MOST = 100_000


def open_bucket(address: Prefix) -> Bucket:
    """The bucket of an address; see `Bucket`."""
    match address.scheme:
        case "gs":
            from weightsmith._outputs.bucket.gcs import GoogleBucket

            return GoogleBucket(address.bucket)
        case "az":
            from weightsmith._outputs.bucket.azure import AzureBucket

            return AzureBucket(address.bucket)
        case _:
            from weightsmith._outputs.bucket.s3 import S3Bucket

            return S3Bucket(address.bucket)


def names_in(bucket: Bucket, address: Prefix) -> dict[str, int]:
    """Relative names and sizes of the objects of an output. Raises StoreError if there are too many."""
    prefix = f"{address.prefix}/" if address.prefix else ""
    found = {key[len(prefix) :]: nbytes for key, nbytes in islice(bucket.names(prefix), _MOST)}
    if len(found) == _MOST:
        raise StoreError(f"{_MOST:,} objects and more", where=str(address), fix="choose another prefix", state=NOTHING_WRITTEN)
    if found.get("") == 0:  # a folder, as consoles show it
        del found[""]
    return found


def manifest_of(bucket: Bucket, address: Prefix) -> Manifest:
    """The manifest of an output. Raises NotFound, and the errors of `decode_manifest`."""
    found = bucket.read(address.key(MANIFEST_NAME), MAX_MANIFEST_BYTES)
    where = address.shown(address.key(MANIFEST_NAME))
    if found is None:
        what = "there is no manifest, so nothing to compare with"
        raise NotFound(what, where=where, fix="name a prefix that weightsmith wrote")
    return decode_manifest(found.data, where)


def is_published(bucket: Bucket, address: Prefix, plan: str) -> bool:
    """The output is that of this plan, whole: its manifest, which is written last, is there. Raises StoreError."""
    try:
        return manifest_of(bucket, address).plan == plan
    except (CheckpointError, Corrupt):
        return False


def check_vacant(
    bucket: Bucket, address: Prefix, *, overwrite: bool, reads: Iterable[str] = (), ours: Collection[str] = ()
) -> tuple[str, ...]:
    """The names that the output will replace. Raises OutputExists if others are there, StoreError if the run reads from there.

    reads  what the run reads, as the user names it
    ours   names that unfinished work of ours has written, or was about to replace

    With `overwrite`, objects are replaced only if weightsmith's manifest, which is with them, lists all of them, and they are
    what was written. Tensors are compared by their sizes alone.
    """
    found = names_in(bucket, address)
    others = [name for name in found if name not in ours]
    if not found:
        return ()
    check_not_read(address, reads)
    if others and not overwrite:
        fix = "choose another prefix, or replace this output with --overwrite (overwrite=True)"
        raise occupied("the output already exists", address, fix, holds=others)
    if others:
        there, fix = {name: found[name] for name in others}, "choose another prefix, or remove these objects yourself"
        check_ours(
            lambda: manifest_of(bucket, address),
            lambda manifest: [name for name in others if name not in manifest.names],
            lambda manifest: differences(manifest, there, _reader(bucket, address)),
            lambda why, lost: occupied(f"will not be overwritten: {why}", address, fix, lost=lost or others),
        )
    return tuple(found)


def marked(bucket: Bucket, address: Prefix, names: Collection[str]) -> set[str]:
    """Those of these files of an output that weightsmith has written: unfinished work may replace or delete them."""
    with ThreadPoolExecutor(UPLOADS) as pool:
        heads = pool.map(lambda name: bucket.head(address.key(name)), names)
        return {name for name, head in zip(names, heads, strict=True) if head is not None and head.token}


def check_not_read(address: Prefix, reads: Iterable[str]) -> None:
    """Raise StoreError if the output is, contains, or lies in anything that the run reads."""
    own = f"{address}/"
    for read in reads:
        for place in _addresses(read):
            if f"{place}/".startswith(own) or own.startswith(f"{place}/"):
                what = f"the run reads {place}, which would be lost"
                raise StoreError(what, where=str(address), fix="choose another output", state=NOTHING_WRITTEN)


def _addresses(read: str) -> Iterator[Address]:
    """What a name of a model may address: a folder, in whose name is a `+`, or a model and its adapter."""
    for text in (read, *read.split("+")):
        if is_address(text):
            with suppress(WeightsmithError):  # not an address as a whole
                yield parse_address(text)


def verify_bucket(address: Prefix, progress: Progress | None) -> Verified:
    """See `places.verify`."""
    bucket = open_bucket(address)
    manifest = manifest_of(bucket, address)
    return compare(str(address), manifest, names_in(bucket, address), _reader(bucket, address), progress)


def _reader(bucket: Bucket, address: Prefix) -> Read:
    return lambda name, start, nbytes: bucket.read_range(address.key(name), start, nbytes)
