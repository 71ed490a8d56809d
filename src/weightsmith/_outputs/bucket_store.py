"""Requests to a bucket in S3, Google Cloud Storage or Azure, through obstore: bounded retries, and one clear error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    OutputExists,
    StoreError,
    Unsupported,
    WeightsmithError,
    first_line,
    legible,
)
from weightsmith._files.remote import retries
from weightsmith._files.remote.retries import lasting, no_panic, passes
from weightsmith._files.remote.stores import allows_http, obstore, settings, status_of

MARK = "weightsmith"
"""Key of the metadata of an object: the token of the run that has put it, and the checksum of its bytes."""
THREADS = 8
"""Small requests at a time."""
PART_BYTES = 8 << 20
"""The size of a part of a file. A file of more than 9,000 such parts has larger ones: stores take 10,000 parts."""
PARTS_AT_ONCE = 4
"""Parts of a file that are in memory together."""
_MOST_PARTS = 9_000
CLAIM_WRITES = 2
"""Requests that create and delete the claim of a run."""
_ARRANGING = 2
"""Requests for a file in parts besides these: one begins the upload, and one completes it."""
_MOST_OBJECTS = 100_000
_DAMAGED = re.compile("<Code>(BadDigest|InvalidDigest|Md5Mismatch|XAmzContent(?:SHA256|Checksum)Mismatch)</Code>")
"""What stores answer if a body is not that of its checksum."""
_LEAST_WAIT_SECONDS = 0.001
_TIMEOUTS = {"connect_timeout": "10s", "timeout": "120s"}
_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; GOOGLE_APPLICATION_CREDENTIALS; or "
    "AZURE_STORAGE_ACCOUNT_NAME and a key, token or identity: see docs/buckets.md"
)
_Result = TypeVar("_Result")


def part_bytes(nbytes: int) -> int:
    """Bytes of each part but the last of a file of this size."""
    return max(PART_BYTES, -(-nbytes // _MOST_PARTS))


def put_requests(nbytes: int) -> int:
    """Requests that put a file of this size, as S3 and Google Cloud Storage count them. Azure needs one fewer for a large file.

    >>> put_requests(PART_BYTES), put_requests(PART_BYTES + 1), put_requests(5 << 30)
    (1, 4, 642)
    """
    return 1 if nbytes <= PART_BYTES else -(-nbytes // part_bytes(nbytes)) + _ARRANGING


def look_requests(files: int) -> int:
    """Lists and small reads of a run that puts so many weight files, and replaces nothing. A list has 1,000 objects.

    For each file, the claim is read twice, and the objects are listed; when all are published, its mark is read twice.
    """
    return 5 * files + 10


class Object(NamedTuple):
    """An object in a list. etag: without quotes, which some lists leave out."""

    nbytes: int
    etag: str


class SmallObject(NamedTuple):
    """A small object. mark: "" if it has none."""

    data: bytes
    meta: Mapping[str, Any]
    mark: str

    @property
    def version(self) -> dict[str, Any]:
        """What a write that replaces it names: see `Bucket.put`."""
        return {name: self.meta[name] for name in ("e_tag", "version") if self.meta.get(name) is not None}


def _mark(attributes: Mapping[str, Any]) -> str:
    return str({name.lower(): value for name, value in attributes.items()}.get(MARK, ""))


class Passing(StoreError):
    """The store does not answer, or not now: it may when it is asked again."""


class Damaged(StoreError):
    """The store has received other bytes than were sent."""


class Taken(StoreError):
    """The condition of a write does not hold."""


class Bucket:
    """One bucket. Thread-safe. Every method raises StoreError if the store refuses, or does not answer.

    Requests are repeated within a bound if they were throttled, cut off or answered with 5xx. Messages hold no keys or headers.
    """

    def __init__(self, scheme: str, name: str) -> None:
        """Sends nothing. Raises StoreError without obstore, and for settings that cannot be used."""
        self._shown, self.unconditional = f"{scheme}://{name}", False
        try:
            self._obstore = obstore(self._shown)
        except Unsupported as error:
            raise StoreError("a bucket needs the package obstore", where=self._shown, fix=error.finding.fix) from error
        self._store, self._endpoint = open_store(self._obstore, scheme, self._shown)
        self._patient, _ = open_store(self._obstore, scheme, self._shown, retries.PATIENCE.failures)

    def names(self, prefix: str) -> dict[str, Object]:
        """The objects below `prefix/`, by relative name; "" for the whole bucket. Raises StoreError if there are too many."""

        def listed() -> dict[str, Object]:
            objects: dict[str, Object] = {}
            start = len(prefix) + 1 if prefix else 0
            for page in self._obstore.list(self._store, prefix or None):
                objects |= {entry["path"][start:]: Object(entry["size"], _tag(entry)) for entry in page}
                if len(objects) > _MOST_OBJECTS:
                    fix = "choose another prefix"
                    where = f"{self._shown}/{prefix}"
                    raise StoreError(f"more than {_MOST_OBJECTS:,} objects", where=where, fix=fix, state=NOTHING_WRITTEN)
            objects.pop("", None)  # a folder, as consoles show it
            return objects

        return self._ask("a list", prefix, listed)

    def folders(self, prefix: str) -> list[str]:
        """The prefixes directly below `prefix/`, without a slash at the end."""

        def listed() -> list[str]:
            answer = self._obstore.list_with_delimiter(self._store, prefix or None)
            return [str(prefix_slash).rstrip("/") for prefix_slash in answer["common_prefixes"]]

        return self._ask("a list", prefix, listed)

    def mark(self, key: str) -> str | None:
        """The mark of an object; "" if it has none, None if there is no such object."""

        def asked() -> str | None:
            try:
                answer = self._obstore.get(self._store, key, options={"head": True})
            except FileNotFoundError as error:
                _check_missing(error)
                return None
            return _mark(answer.attributes)

        return self._ask("an object's state", key, asked)

    def read(self, key: str, max_bytes: int) -> SmallObject | None:
        """A small object; None if it is missing. Raises StoreError if it is longer."""

        def asked() -> SmallObject | None:
            try:
                answer = self._obstore.get(self._store, key)
                if answer.meta["size"] > max_bytes:
                    what = f"more than the {max_bytes:,} bytes that are read"
                    raise StoreError(what, where=self.shown(key), fix="remove it")
                return SmallObject(bytes(answer.bytes()), answer.meta, _mark(answer.attributes))
            except FileNotFoundError as error:
                _check_missing(error)
                return None

        return self._ask("an object", key, asked)

    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        """Some bytes of an object; fewer if it ends."""
        return self._ask("an object", key, lambda: bytes(self._obstore.get_range(self._store, key, start=start, length=nbytes)))

    def download(self, key: str, path: Path) -> None:
        """Write an object into a file."""

        def asked() -> None:
            with path.open("wb") as file:
                for piece in self._obstore.get(self._store, key).stream(min_chunk_size=1 << 20):
                    file.write(bytes(piece))

        self._ask("an object", key, asked)

    def put_file(self, key: str, path: Path, mark: str) -> None:
        """Write an object, in parts if it is large."""
        nbytes = path.stat().st_size

        def asked() -> None:
            self._obstore.put(
                self._patient,
                key,
                path,
                attributes={MARK: mark},
                use_multipart=nbytes > PART_BYTES,
                chunk_size=part_bytes(nbytes),
                max_concurrency=PARTS_AT_ONCE,
            )

        self._ask("a file", key, asked, retries.Patience(failures=1))  # parts are repeated by `_patient`

    def shown(self, key: str) -> str:
        """The address of an object, for messages."""
        return f"{self._shown}/{key}"

    def put(self, key: str, data: bytes, mode: Any = "overwrite", mark: str = "") -> dict[str, Any]:
        """Write a small object, and return its version.

        mode  "create", or the version that it replaces: raises Taken if there is another
        """
        attributes = {MARK: mark} if mark else None

        def asked() -> dict[str, Any]:
            result = self._obstore.put(self._store, key, data, attributes=attributes, mode=mode, use_multipart=False)
            return {name: value for name, value in result.items() if value is not None}

        return self._ask("a small object", key, asked)

    def put_version(self, key: str, data: bytes, before: Mapping[str, Any] | None, mark: str = "") -> dict[str, Any]:
        """Write a small object in place of a version, and return its own; before: None if there is none. Raises Taken.

        A store that has no conditional writes replaces whatever is there, and is `unconditional` then.
        """
        try:
            return self.put(key, data, "create" if before is None else dict(before), mark)
        except Taken:
            raise
        except StoreError as error:
            cause = error.__cause__
            if not isinstance(cause, NotImplementedError) and "NotImplemented" not in str(cause):
                raise
            self.unconditional = True
            return self.put(key, data, mark=mark)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; they may be missing."""

        def delete(key: str) -> None:
            def asked() -> None:
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._store, key)

            self._ask("a deletion", key, asked)

        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(delete, keys):
                pass

    def _ask(
        self, operation: str, key: str, request: Callable[[], _Result], patience: retries.Patience | None = None
    ) -> _Result:
        """What a request returns; repeated while that may help.

        patience  with a store that does not answer; by default the one that a body which arrives damaged has in any case
        """

        def once() -> _Result:
            try:
                with no_panic():
                    return request()
            except WeightsmithError:
                raise
            except Exception as error:
                raise self._failed(error, operation, key) from error

        def answered() -> _Result:
            return retries.retry(once, lambda error: isinstance(error, Passing), patience)

        return retries.retry(answered, lambda error: isinstance(error, Damaged))

    def _failed(self, error: Exception, operation: str, key: str) -> StoreError:
        """What an exception of obstore means."""
        known, where = self._obstore.exceptions, f"{self._shown}/{key}"
        if isinstance(error, OSError) and error.filename:
            return StoreError(f"a file of this machine cannot be read: {error.strerror}", where=str(error.filename or where))
        if isinstance(error, known.AlreadyExistsError | known.PreconditionError):
            return Taken("another program has written this object", where=where)
        if isinstance(error, known.InvalidPathError) or type(error).__name__ == "InvalidPathError":
            details = [legible(first_line(error), 200)]
            what, fix = "an object is there whose name no output has", "choose another prefix"
            return OutputExists(what, where=legible(where, 200), details=details, fix=fix, state=NOTHING_WRITTEN)
        if code := _DAMAGED.search(str(error)):
            what = f"{operation} does not arrive as it was sent ({code[1]})"
            fix = "check the network and its proxies, and run again: what is uploaded is kept"
            return Damaged(what, where=where, fix=fix)
        status = status_of(error)
        if re.search(r"token request|169\.254\.|redential|Account must be specified", str(error)):
            what = f"there are no usable credentials: {legible(first_line(error), 200)}"
            return StoreError(what, where=where, fix=_CREDENTIALS)
        if (isinstance(error, FileNotFoundError) and error.errno is None) or status == 404:
            return StoreError(f"the store refused {operation}: no such bucket", where=where, fix="check the address")
        if isinstance(error, known.PermissionDeniedError | known.UnauthenticatedError) or status in (401, 403):
            what = f"the store refused {operation}: the keys may not do this"
            fix = "check the keys, or the role, that the environment gives: see docs/buckets.md"
            return StoreError(what, where=where, fix=fix)
        if stays := lasting(error, self._endpoint):
            return StoreError(f"the store cannot be reached: {stays.what}", where=where, fix=stays.fix)
        why = legible(first_line(error), 200)
        if status and not passes(status) and status >= 400:
            fix = f"check {self._endpoint} and the keys that the environment gives: see docs/buckets.md"
            return StoreError(f"the store refused {operation} ({status}): {why}", where=where, fix=fix)
        fix = f"check the network and {self._endpoint}, and run again: what is uploaded is kept"
        return Passing(f"the store does not answer {operation} as it should: {why}", where=where, fix=fix)


def open_store(module: Any, scheme: str, address: str, attempts: int = 0) -> tuple[Any, str]:
    """obstore's store, and what to check if it does not answer. Raises StoreError for settings that cannot be used.

    attempts  that it makes besides the first, for each request; 0: `Bucket` makes them
    """
    endpoint, options = settings(scheme)
    shown = f"the endpoint {endpoint}" if endpoint else "the address"
    if endpoint and not endpoint.startswith("https://") and not allows_http(endpoint):
        fix = "use https, or set AWS_ALLOW_HTTP=true if that network is safe"
        raise StoreError("the endpoint of the store has no TLS", where=address, fix=fix)
    if scheme == "s3":  # the store compares what arrives
        options = {**options, "config": {**options.get("config", {}), "checksum_algorithm": "SHA256"}}
    most_seconds = max(_LEAST_WAIT_SECONDS, retries.PATIENCE.most_seconds)  # obstore panics if the first is longer, or none
    first_seconds = min(0.1, most_seconds)
    wait = {"init_backoff": timedelta(seconds=first_seconds), "max_backoff": timedelta(seconds=most_seconds), "base": 2}
    try:
        with no_panic():
            store = module.store.from_url(
                f"{address}/",
                client_options={**_TIMEOUTS, "allow_http": allows_http(endpoint)},
                retry_config={"max_retries": attempts, "backoff": wait, "retry_timeout": timedelta(minutes=5)},
                **options,
            )
    except Exception as error:
        no_account = "Account must be specified" in str(error)
        fix = _CREDENTIALS if no_account else f"check {shown} and the keys that the environment gives: see docs/buckets.md"
        raise StoreError(f"the store cannot be opened: {first_line(error)}", where=address, fix=fix) from error
    return store, shown


def _check_missing(error: FileNotFoundError) -> None:
    """Raise what is no answer of the store, but a file of its settings that is missing."""
    if error.errno is not None:
        raise error


def _tag(answer: Mapping[str, Any]) -> str:
    return str(answer.get("e_tag") or "").strip('"')
