"""What a run asks of a bucket, whatever the store: `s3`, and one file for each other kind.

Every request is repeated within a bound if it was throttled, cut off or answered with 5xx. Parts and files are sent with their
MD5, which the store compares. Messages contain codes and keys, never headers or credentials.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError
from weightsmith._files.remote import retries
from weightsmith._files.remote.access import allows_http
from weightsmith._files.remote.failures import lasting

UPLOADS = 8
"""Parts uploaded at a time, by one thread each."""
TOKEN = "weightsmith"
"""Key of the metadata of an object: which work has made it. What has none, and does not say so in its bytes, is not ours."""


Answer = TypeVar("Answer")


class Object(NamedTuple):
    """A small object.

    etag         of this version, for `Bucket.replace`
    age_seconds  since it was written, by the clock of the store
    """

    data: bytes
    etag: str
    age_seconds: float


class Head(NamedTuple):
    """What is known of an object. token: given to `Bucket.begin` or `Bucket.put`; "" if another program has written it."""

    nbytes: int
    token: str


class Run(NamedTuple):
    """Bytes of an object in the same store: bucket, key and ETag, and the first of them."""

    bucket: str
    key: str
    etag: str
    start: int


class Bucket(Protocol):
    """One bucket. Thread-safe. Every method raises StoreError if the store refuses, or does not answer.

    equal_parts  the store takes parts of one size only, the last one aside
    """

    equal_parts: bool

    # small objects

    def read(self, key: str, max_bytes: int) -> Object | None:
        """An object; None if it is missing. Raises StoreError if it is longer."""

    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        """Some bytes of an object; fewer if it ends."""

    def put(self, key: str, data: bytes, token: str = "") -> str:
        """Write an object: its ETag. token: remembered with it."""

    def create(self, key: str, data: bytes) -> str | None:
        """Write an object that must not exist: its ETag; None if it exists. Raises NoConditions."""

    def replace(self, key: str, data: bytes, etag: str) -> str | None:
        """Write an object in place of the version with this ETag: its own; None if it is gone. Raises NoConditions."""

    def head(self, key: str) -> Head | None:
        """What is known of an object; None if it is missing."""

    def delete(self, key: str) -> None:
        """Delete an object; it may be missing."""

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes of the objects whose keys start with `prefix`, in order."""

    def folders(self, prefix: str) -> Iterator[str]:
        """Keys that start with `prefix`, up to the next slash after it, the slash included; each once."""

    # uploads in parts

    def begin(self, key: str, token: str) -> str:
        """Begin an upload in parts: its id. token: remembered with the object."""

    def upload(self, key: str, upload: str, number: int, data: bytes | bytearray, md5: bytes) -> str:
        """Upload a part, from 1: its ETag. md5: of `data`. Raises Missing if there is no such upload."""

    def copy(self, key: str, upload: str, number: int, run: Run, nbytes: int, md5: bytes) -> str:
        """Copy bytes of an object, which should have this MD5, to a part: its ETag; "" if the store does not copy them."""

    def parts(self, key: str, upload: str) -> dict[int, tuple[str, int]] | None:
        """Number, ETag and size of the uploaded parts; None if there is no such upload."""

    def complete(self, key: str, upload: str, etags: Sequence[str]) -> bool:
        """Make an object of the parts 1, 2, … False if there is no such upload: it may be complete already."""

    def abort(self, key: str, upload: str) -> None:
        """Discard an upload and its parts; it may be gone."""


class TransientError(StoreError):
    """The store does not answer, or not now: it may when it is asked again."""


class Missing(StoreError):
    """There is no such object or upload."""


class Empty(StoreError):
    """A range begins after the end of an object."""


class Refused(StoreError):
    """The condition of a write does not hold."""


class Damaged(StoreError):
    """A body did not arrive as it was sent."""


class NoConditions(StoreError):
    """The store has no conditional writes."""


def check_tls(endpoint: str, where: str) -> None:
    """Raise StoreError if what is sent there could be read by others."""
    if not endpoint.startswith("https://") and not allows_http(endpoint):
        fix = "use https, or set AWS_ALLOW_HTTP=true if that network is safe"
        raise StoreError("the endpoint of the store has no TLS", where=where, fix=fix)


def retry(call: Callable[[], Answer]) -> Answer:
    """Call until it does not raise TransientError or Damaged; see `remote.retries`."""
    return retries.retry(call, lambda error: isinstance(error, TransientError | Damaged))


def unanswered(error: BaseException, where: str, endpoint: str, again: str) -> StoreError:
    """The error for a request without an answer: TransientError, unless it stays. endpoint: what says where the store is."""
    kind = type(error).__name__
    if stays := lasting(error, endpoint):
        return StoreError(f"the store cannot be reached: {stays.what}", where=where, fix=stays.fix)
    what = f"the store does not answer ({kind}, {retries.PATIENCE.failures + 1} attempts)"
    return TransientError(what, where=where, fix=f"check the network and {endpoint}, and {again}")


def pages(ask: Callable[[dict[str, Any]], tuple[Answer, dict[str, Any] | None]], where: str) -> Iterator[Answer]:
    """The pages of a list. Raises StoreError if a marker is empty or repeated: the list would never end.

    ask  the page at a marker, {} for the first page; and the marker of the next page, None if there is none
    """
    marker: dict[str, Any] = {}
    seen: set[str] = set()
    while True:
        page, following = ask(marker)
        yield page
        if following is None:
            return
        if not following or str(following) in seen:
            what = "the store's list does not end: the marker of a page is missing or repeated"
            raise StoreError(what, where=where, fix="check the endpoint of the store, and run again")
        seen.add(str(following))
        marker = following


def written_before(bucket: Bucket, key: str, data: bytes) -> str | None:
    """The ETag of an object with these bytes, whose write was refused; None if it has others.

    A request that was repeated is refused because of itself if the answer to the first attempt was lost.
    """
    found = bucket.read(key, 1 << 20)
    return found.etag if found is not None and found.data == data else None


def not_ours(where: str) -> StoreError:
    """The error for an object of another program, where work in progress would be kept."""
    return StoreError(
        "this object is in the way: it has the name of unfinished work, and weightsmith did not write it",
        where=where,
        fix="remove it yourself, or choose another output",
        state=NOTHING_WRITTEN,
    )


def not_installed(what: str, library: str, extra: str, where: str) -> StoreError:
    """The error for a store whose library is missing. extra: of weightsmith, which installs it."""
    return StoreError(f"{what} requires {library}", where=where, fix=f"install it: pip install 'weightsmith[{extra}]'")


def too_long(max_bytes: int, where: str) -> StoreError:
    """The error for an object that is longer than anything of ours."""
    return StoreError(f"more than the {max_bytes:,} bytes that are read", where=where, fix="remove it")


def md5_of(data: bytes | bytearray) -> bytes:
    """The MD5 that stores compare what they receive with."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def etag_of(md5: bytes) -> str:
    """The ETag of a part with this MD5."""
    return f'"{md5.hex()}"'
