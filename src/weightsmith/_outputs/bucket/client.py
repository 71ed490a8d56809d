"""What a run asks of a bucket. `s3`, `gcs` and `azure` have the requests of each store; what they have in common is here.

Every request is repeated within a bound if it was throttled, cut off or answered with 5xx. Parts and files are sent with their
MD5, which the store compares. Messages contain codes and keys, never headers or credentials.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, NamedTuple, TypeVar

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError, WeightsmithError, first_line, legible
from weightsmith._base.installation import install
from weightsmith._files.remote import retries
from weightsmith._files.remote.addresses import check_network
from weightsmith._files.remote.retries import lasting, no_panic, passes
from weightsmith._files.remote.stores import allows_http

UPLOADS = 8
"""Parts uploaded at a time, by one thread each."""
TOKEN = "weightsmith"
"""Key of the metadata of an object: which work has made it. What has none, and does not say so in its bytes, is not ours."""
AGAIN = "run again: what is uploaded is kept"

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


class Page(NamedTuple):
    """A page of a list, and where the next one begins; None: there is none."""

    entries: list[Any]
    following: Any


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


class Bucket(ABC):
    """One bucket. Thread-safe. Every method raises StoreError if the store refuses, or does not answer.

    A store defines the abstract methods. Those with an underscore raise Missing, Empty and Refused, which say here what
    follows from them.

    equal_parts     the store takes parts of one size only, the last one aside
    shows_requests  the errors of its library contain addresses with a signature, so they are no causes of ours
    """

    scheme: ClassVar[str]
    equal_parts = False
    shows_requests = False

    def __init__(self, name: str) -> None:
        """Sends nothing. Raises StoreError without the store's library, and for settings that cannot be used."""
        self.name = name
        check_network(self.scheme)

    # small objects

    def read(self, key: str, max_bytes: int) -> Object | None:
        """An object; None if it is missing. Raises StoreError if it is longer."""
        try:
            found = self._get(key, max_bytes + 1)
        except Missing:
            return None
        except Empty:
            found = self._get(key, None)
        if len(found.data) > max_bytes:
            raise StoreError(f"more than the {max_bytes:,} bytes that are read", where=self._shown(key), fix="remove it")
        return found

    def put(self, key: str, data: bytes, token: str = "") -> str:
        """Write an object: its ETag. token: remembered with it."""
        return self._put(key, data, token, None)

    def create(self, key: str, data: bytes) -> str | None:
        """Write an object that must not exist: its ETag; None if it exists. Raises NoConditions."""
        try:
            return self._put(key, data, "", "")
        except Refused:
            return self._written_before(key, data)

    def replace(self, key: str, data: bytes, etag: str) -> str | None:
        """Write an object in place of the version with this ETag: its own; None if it is gone. Raises NoConditions."""
        try:
            return self._put(key, data, "", etag)
        except (Refused, Missing):
            return self._written_before(key, data)

    def _written_before(self, key: str, data: bytes) -> str | None:
        """The ETag of an object with these bytes, whose write was refused; None if it has others.

        A request that was repeated is refused because of itself if the answer to the first attempt was lost.
        """
        found = self.read(key, 1 << 20)
        return found.etag if found is not None and found.data == data else None

    def head(self, key: str) -> Head | None:
        """What is known of an object; None if it is missing."""
        try:
            return self._head(key)
        except Missing:
            return None

    def delete(self, key: str) -> None:
        """Delete an object; it may be missing."""
        with suppress(Missing):
            self._delete(key)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes of the objects whose keys start with `prefix`, in order."""
        return self._pages(lambda marker: self._list(prefix, marker, folders=False), prefix)

    def folders(self, prefix: str) -> Iterator[str]:
        """Keys that start with `prefix`, up to the next slash after it, the slash included; each once."""
        return self._pages(lambda marker: self._list(prefix, marker, folders=True), prefix)

    # uploads in parts

    def parts(self, key: str, upload: str) -> dict[int, tuple[str, int]] | None:
        """Number, ETag and size of the uploaded parts; None if there is no such upload."""
        try:
            return dict(self._pages(lambda marker: self._parts(key, upload, marker), key))
        except Missing:
            return None

    def complete(self, key: str, upload: str, etags: Sequence[str]) -> bool:
        """Make an object of the parts 1, 2, … False if there is no such upload: it may be complete already."""
        try:
            self._complete(key, upload, etags)
            return True
        except Missing:
            return False

    def abort(self, key: str, upload: str) -> None:
        """Discard an upload and its parts; it may be gone."""
        with suppress(Missing):
            self._abort(key, upload)

    # requests of a store

    @abstractmethod
    def _get(self, key: str, nbytes: int | None) -> Object:
        """An object, or so many of its first bytes."""

    @abstractmethod
    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        """Some bytes of an object; fewer if it ends."""

    @abstractmethod
    def _put(self, key: str, data: bytes, token: str, etag: str | None) -> str:
        """Write an object in place of the version with this ETag ("": none; None: any): its own."""

    @abstractmethod
    def _head(self, key: str) -> Head: ...
    @abstractmethod
    def _delete(self, key: str) -> None: ...

    @abstractmethod
    def _list(self, prefix: str, marker: Any, *, folders: bool) -> Page:
        """The page of a list that begins at a marker; None: the first one. folders: see `folders`, else `names`."""

    @abstractmethod
    def begin(self, key: str, token: str) -> str:
        """Begin an upload in parts: its id. token: remembered with the object."""

    @abstractmethod
    def upload(self, key: str, upload: str, number: int, data: bytes | bytearray, md5: bytes) -> str:
        """Upload a part, from 1: its ETag. md5: of `data`. Raises Missing if there is no such upload."""

    @abstractmethod
    def copy(self, key: str, upload: str, number: int, run: Run, nbytes: int, md5: bytes) -> str:
        """Copy bytes of an object, which should have this MD5, to a part: its ETag; "" if the store does not copy them."""

    @abstractmethod
    def _parts(self, key: str, upload: str, marker: Any) -> Page:
        """The page of a list of parts, (number, (ETag, size)), that begins at a marker."""

    @abstractmethod
    def _complete(self, key: str, upload: str, etags: Sequence[str]) -> None: ...
    @abstractmethod
    def _abort(self, key: str, upload: str) -> None: ...

    @abstractmethod
    def _failed(self, error: Any, operation: str, where: str) -> StoreError:
        """Translate an error of the store's library."""

    # what the requests are made with

    @contextmanager
    def _importing(self, what: str, library: str, extra: str) -> Iterator[None]:
        """Say that the library of the store is missing. extra: of weightsmith, which installs it."""
        try:
            yield
        except ImportError as error:
            fix = f"run {install(extra)}"
            raise StoreError(f"{what} requires {library}", where=f"{self.scheme}://{self.name}", fix=fix) from error

    @contextmanager
    def _opening(self, fix: str) -> Iterator[None]:
        """Say that the store's library does not accept what the environment says."""
        try:
            with no_panic():
                yield
        except WeightsmithError:
            raise
        except Exception as error:
            what = f"the store cannot be opened: {type(error).__name__}: {first_line(error)}"
            cause = None if self.shows_requests else error
            raise StoreError(what, where=f"{self.scheme}://{self.name}", fix=fix) from cause

    def _check_tls(self, endpoint: str) -> None:
        """Raise StoreError if what is sent there could be read by others."""
        if not endpoint.startswith("https://") and not allows_http(endpoint):
            fix = "use https, or set AWS_ALLOW_HTTP=true if that network is safe"
            raise StoreError("the endpoint of the store has no TLS", where=f"{self.scheme}://{self.name}", fix=fix)

    def _ask(self, operation: str, key: str, request: Callable[[], Answer]) -> Answer:
        """What a call of the store's library returns that makes one request; repeated while that may help."""

        def once() -> Answer:
            try:
                with no_panic():
                    return request()
            except WeightsmithError:
                raise
            except Exception as error:
                raise self._failed(error, operation, self._shown(key)) from None if self.shows_requests else error

        return retry(once)

    def _pages(self, ask: Callable[[Any], Page], key: str) -> Iterator[Any]:
        """The entries of a list, page by page. Raises StoreError if a marker is empty or repeated: it would never end."""
        marker: Any = None
        seen: set[Any] = set()
        while True:
            entries, marker = ask(marker)
            yield from entries
            if marker is None:
                return
            if not marker or marker in seen:
                what = "the store's list does not end: the marker of a page is missing or repeated"
                fix = "check the endpoint of the store, and run again"
                raise StoreError(what, where=self._shown(key), fix=fix)
            seen.add(marker)

    def _shown(self, key: str) -> str:
        return f"{self.scheme}://{self.name}/{key}"


def retry(call: Callable[[], Answer]) -> Answer:
    """Call until it does not raise TransientError or Damaged; see `remote.retries`."""
    return retries.retry(call, lambda error: isinstance(error, TransientError | Damaged))


def refusal(kind: type[StoreError] | None, operation: str, code: str, status: int, where: str, fix: str) -> StoreError:
    """The error for an answer that is none. kind: what the code means; None: nothing in particular."""
    said = f"{legible(code, 80)} ({status})"
    if kind is TransientError or (kind is None and passes(status)):
        return TransientError(f"the store kept answering {said} to {operation}", where=where, fix=fix)
    return (kind or StoreError)(f"the store refused {operation}: {said}", where=where, fix=fix)


def unanswered(error: BaseException, where: str, endpoint: str) -> StoreError:
    """The error for a request without an answer: TransientError, unless it stays. endpoint: what says where the store is."""
    kind = type(error).__name__
    if stays := lasting(error, endpoint):
        return StoreError(f"the store cannot be reached: {stays.what}", where=where, fix=stays.fix)
    what = f"the store does not answer ({kind}, {retries.PATIENCE.failures + 1} attempts)"
    return TransientError(what, where=where, fix=f"check the network and {endpoint}, and {AGAIN}")


def age(now: str | None, written: datetime) -> float:
    """Seconds since an object was written, at the `Date` of an answer, which is in whole seconds; 0 without one."""
    return max(0.0, (parsedate_to_datetime(now) - written).total_seconds()) if now else 0.0


def not_ours(where: str) -> StoreError:
    """The error for an object of another program, where work in progress would be kept."""
    what = "this object is in the way: it has the name of unfinished work, and weightsmith did not write it"
    return StoreError(what, where=where, fix="remove it yourself, or choose another output", state=NOTHING_WRITTEN)


def md5_of(data: bytes | bytearray) -> bytes:
    """The MD5 that stores compare what they receive with."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def etag_of(md5: bytes) -> str:
    """The ETag of a part with this MD5."""
    return f'"{md5.hex()}"'
