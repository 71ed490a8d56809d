"""Object stores, read with the package obstore: S3 and stores with its API, GCS, Azure.

`access` says where keys, regions and endpoints come from. The object's ETag is sent as a condition with every request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import CheckpointError, NotFound, Unsupported, first_line
from weightsmith._base.files import show
from weightsmith._base.installation import install
from weightsmith._files.remote.access import allows_http, settings
from weightsmith._files.remote.addresses import Address
from weightsmith._files.remote.failures import lasting, no_panic, passes
from weightsmith._files.remote.http import CHANGED_FIX, DOWNLOAD_FIX, NO_RANGES
from weightsmith._files.remote.retries import Again

if TYPE_CHECKING:
    from types import ModuleType

_TIMEOUTS = {"connect_timeout": "10s", "timeout": "60s"}
_CHUNK_BYTES = 1 << 20


def obstore(where: str) -> ModuleType:
    """The package. Raises Unsupported where it is not installed."""
    try:
        import obstore as found
        import obstore.exceptions
        import obstore.store
    except ImportError:
        what = "the package obstore, which reads object stores, is not installed"
        raise Unsupported(what, where=where, fix=f"run {install('remote')}") from None
    module: ModuleType = found
    return module


class Store:
    """A folder in an object store."""

    def __init__(self, address: Address) -> None:
        """Raises Unsupported without obstore, CheckpointError for settings that it does not accept."""
        self.where = str(address)
        self._obstore = obstore(self.where)
        endpoint, options = settings(address.scheme)
        self._endpoint = f"the endpoint {endpoint}" if endpoint else "the address"
        try:
            with no_panic():
                self._store = self._obstore.store.from_url(
                    str(address),
                    client_options={**_TIMEOUTS, "allow_http": allows_http(endpoint)},
                    retry_config={"max_retries": 0},  # retried by `retries`
                    **options,
                )
        except Exception as error:
            fix = f"check {self._endpoint} and the keys that the environment gives: see docs/remote.md"
            raise CheckpointError(f"the store cannot be opened: {first_line(error)}", where=self.where, fix=fix) from error

    def objects(self, subfolder: str = "") -> tuple[list[dict[str, Any]], list[str]]:
        """path, size and e_tag of every object of the folder itself, or of a subfolder; and its subfolders. Raises Again."""
        try:
            with no_panic():
                listing = self._obstore.list_with_delimiter(self._store, subfolder or None)
        except Exception as error:
            raise self.failure(error, self.where) from error
        return [dict(meta) for meta in listing["objects"]], [str(prefix).rstrip("/") for prefix in listing["common_prefixes"]]

    def file(self, name: str, nbytes: int, tag: str) -> StoreFile:
        """A file of the folder. tag: its ETag."""
        return StoreFile(self, name, nbytes, tag)

    def get(self, name: str, first: int, end: int, tag: str) -> Any:
        """obstore's answer to a request for a run of bytes."""
        options = {"range": (first, end), **({"if_match": tag} if tag else {})}
        with no_panic():
            return self._obstore.get(self._store, name, options=options)

    def head(self, name: str) -> Any:
        """Size and ETag of an object now."""
        with no_panic():
            return self._obstore.head(self._store, name)

    def failure(self, error: Exception, where: str) -> Exception:
        """What an exception of obstore means."""
        known = self._obstore.exceptions
        status = status_of(error)
        if isinstance(error, known.PreconditionError | known.NotModifiedError):
            return CheckpointError("the object has changed since it was first read", where=where, fix=CHANGED_FIX)
        if isinstance(error, known.NotFoundError | FileNotFoundError) or status == 404:
            return NotFound("no such object, or no such bucket", where=where, fix="Check the address.")
        if isinstance(error, known.PermissionDeniedError | known.UnauthenticatedError) or status in (401, 403):
            fix = "Check the keys, or the role, that the environment gives: see docs/remote.md."
            return CheckpointError("the store refuses access", where=where, fix=fix)
        why = f"{type(error).__name__}: {first_line(error)}"
        if "non-partial response" in str(error):
            return CheckpointError(NO_RANGES, where=where, fix=DOWNLOAD_FIX)
        if stays := lasting(error, self._endpoint):
            return CheckpointError(f"cannot be read: {stays.what}", where=where, fix=stays.fix)
        if status and not passes(status) and status >= 400:
            fix = f"Check {self._endpoint} and the keys that the environment gives: see docs/remote.md."
            return CheckpointError(f"the store refuses the request ({why})", where=where, fix=fix)
        return Again(f"the store does not answer as it should ({why})")


class StoreFile:
    """An object: `retries.Ranges`."""

    def __init__(self, store: Store, name: str, nbytes: int, tag: str) -> None:
        self.where = f"{store.where}/{name}"
        self.nbytes = nbytes
        self._store, self._name = store, name
        self.version = self._tag = _quoted(tag)

    def request(self, first: int, end: int) -> Iterator[bytes]:
        """See `Ranges`."""
        try:
            answer = self._store.get(self._name, first, end, self._tag)
            self._check(answer.meta)
            if tuple(answer.range) != (first, end):
                raise Again(f"bytes {first:,} to {end:,} were asked for, and bytes {answer.range} came")
            n_missing = end - first
            chunks = iter(answer.stream(min_chunk_size=_CHUNK_BYTES))
            while True:
                with no_panic():
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                piece = bytes(chunk)
                n_missing -= len(piece)
                if n_missing < 0:
                    raise Again(f"the answer has more than the {end - first:,} bytes that were asked for")
                yield piece
        except (Again, CheckpointError, GeneratorExit):
            raise
        except Exception as error:
            raise self._store.failure(error, self.where) from error

    def check_parts(self) -> None:
        """See `Ranges`. Every store has them."""

    def check_unchanged(self) -> None:
        """See `Ranges`."""
        try:
            meta = self._store.head(self._name)
        except Exception as error:
            raise self._store.failure(error, self.where) from error
        self._check(meta)

    def _check(self, meta: Any) -> None:
        size, tag = meta["size"], _quoted(meta.get("e_tag") or "")
        if size != self.nbytes or (tag and self._tag and tag != self._tag):
            then, now = (f"{self.nbytes:,} bytes", f"{size:,}") if size != self.nbytes else (show(self._tag), show(tag))
            what = f"the object has changed since it was first read: {then} then, {now} now"
            raise CheckpointError(what, where=self.where, fix=CHANGED_FIX)
        self._tag = self._tag or tag  # a list may lack what the object's answers have


def status_of(error: Exception) -> int:
    """The status in the text of an exception of obstore, whose errors of lists are all of one type; 0 without one."""
    found = re.search(r"(?:status(?: code)?:?|non-2xx status code:) ([0-9]{3})\b", str(error))
    return int(found[1]) if found is not None else 0


def _quoted(tag: str) -> str:
    """An ETag as answers have it: the lists of some stores leave the quotes out."""
    return tag if not tag or tag.startswith(('"', "W/")) else f'"{tag}"'
