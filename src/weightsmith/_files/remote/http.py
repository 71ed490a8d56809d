"""One request for a run of bytes of a file behind http, and the checks of its answer.

The client is huggingface_hub's: its proxies, certificates and pool of connections. Redirects are followed here, so that a token
goes to no other host, and so that an address that a redirect has given is used until it expires.
"""

from __future__ import annotations

import email.utils
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urljoin, urlsplit

from weightsmith._base.errors import CheckpointError, WeightsmithError, without_queries
from weightsmith._base.files import show
from weightsmith._files.remote.addresses import check_hub, is_loopback
from weightsmith._files.remote.retries import Again, lasting, no_panic, passes

CHANGED_FIX = "Run again: the model is then planned as it is now. To be safe from changes, name a revision."

NO_RANGES = "the server sends the whole file where a part was asked for: it does not know byte ranges"
DOWNLOAD_FIX = "Download the model, and name its folder."

_REDIRECTS = (301, 302, 303, 307, 308)
_EXPIRED = (400, 401, 403, 404, 410)
_MAX_REDIRECTS = 6
_MAX_DRAINED = 64 << 10  # of a body that nobody wants: so the connection can be used again


@dataclass(eq=False, repr=False)
class HttpFile:
    """A file behind http: `retries.Ranges`.

    headers  of requests; the token among them is sent to the host of `url` alone. Neither is in a representation
    pinned   header and value that the first answer must have, "" for none: `("x-repo-commit", commit)`
    tag      what the server calls the content (`tag_of`), where it is known
    """

    url: str
    where: str
    nbytes: int
    version: str
    headers: Mapping[str, str]
    pinned: tuple[str, str] = ("", "")
    tag: str = ""

    def __post_init__(self) -> None:
        self._resolved = ""
        self._knows_ranges = self._sent_whole = False
        self._linked = ""
        self._tags: dict[str, str] = {}

    def request(self, first: int, end: int) -> Iterator[bytes]:
        resolved = self._resolved
        headers = {**self.headers, "Range": f"bytes={first}-{end - 1}"}
        with ask("GET", resolved or self.url, headers, self.url, self.where) as (response, hops):
            self._check_hops(hops, fresh=not resolved)
            status = response.status_code
            if status in _EXPIRED and (resolved or len(hops) > 1):
                self._resolved = ""
                raise Again(f"the address that the server gave has expired (status {status})")
            check_status(response, self.where)
            self._check_answer(response, first, end)
            self._check_tag(response, hops[-1][0])
            if len(hops) > 1:
                self._resolved = hops[-1][0]
            n_missing = end - first
            for piece in _pieces(response, self.where):
                if len(piece) > n_missing:
                    if status == 206:
                        raise Again(f"the answer has more than the {end - first:,} bytes that were asked for")
                    piece = piece[:n_missing]
                n_missing -= len(piece)
                yield piece
                if not n_missing and status == 200:
                    return

    def check_parts(self) -> None:
        if self._sent_whole:
            raise CheckpointError(NO_RANGES, where=self.where, fix=DOWNLOAD_FIX)

    def check_unchanged(self) -> None:
        """A commit does not change; other files are asked about."""
        if self.pinned[0]:
            return
        with ask("HEAD", self.url, self.headers, self.url, self.where) as (response, hops):
            check_status(response, self.where)
            if (length := response.headers.get("content-length")) is not None and length != str(self.nbytes):
                raise self._changed(f"{self.nbytes:,} bytes then, {show(length)} now")
            self._check_tag(response, hops[-1][0])

    def _check_hops(self, hops: list[tuple[str, Mapping[str, str]]], *, fresh: bool) -> None:
        """The first answer, of the place itself, says which content it leads to."""
        if not fresh:
            return
        _, headers = hops[0]
        name, value = self.pinned
        if name and headers.get(name, value) != value:
            raise self._changed(f"commit {show(value)} then, {show(headers.get(name))} now")
        linked = headers.get("x-linked-etag", "")
        if linked and self._linked and linked != self._linked:
            raise self._changed(f"ETag {show(self._linked)} then, {show(linked)} now")
        self._linked = self._linked or linked

    def _check_answer(self, response: Any, first: int, end: int) -> None:
        status, headers = response.status_code, response.headers
        if headers.get("content-encoding", "identity") != "identity":
            raise Again(f"the server encodes the file: {show(headers['content-encoding'])}")
        length = headers.get("content-length")
        if status == 200:
            if length is not None and length != str(self.nbytes):
                raise self._changed(f"{self.nbytes:,} bytes then, {show(length)} now")
            if (first, end) != (0, self.nbytes):
                if self._knows_ranges or headers.get("accept-ranges", "").lower() == "bytes":
                    raise Again("the server sends the whole file where a part was asked for")
                self._sent_whole = True
                if first:  # of the start of a file, the rest is not read
                    self.check_parts()
            return
        span = headers.get("content-range", "")
        total = re.fullmatch(r"bytes \d+-\d+/(\d+)", span)
        if total is not None and int(total[1]) != self.nbytes:
            raise self._changed(f"{self.nbytes:,} bytes then, {int(total[1]):,} now")
        if span != f"bytes {first}-{end - 1}/{self.nbytes}":
            raise Again(f"bytes {first:,} to {end - 1:,} were asked for, and the answer has Content-Range {show(span)}")
        self._knows_ranges = True
        if length is not None and length != str(end - first):
            raise Again(f"the answer has {show(length)} bytes of {end - first:,}")

    def _check_tag(self, response: Any, url: str) -> None:
        """The same content has the same tag at the same place; at another place, if nothing else vouches for it."""
        tag, place = tag_of(response.headers), url.partition("?")[0]
        known = self._tags.get(place, self.tag if not self._linked else "")
        if known and tag and tag != known:
            raise self._changed(f"{known} then, {tag} now")
        self._tags[place] = known or tag
        if not self._linked:
            self.tag = self.tag or tag

    def _changed(self, what: str) -> CheckpointError:
        return CheckpointError(f"the file has changed since it was first read: {what}", where=self.where, fix=CHANGED_FIX)


def tag_of(headers: Mapping[str, str]) -> str:
    """What a server says of the version of a file, with the header's name; "" for nothing."""
    for name in ("etag", "last-modified"):
        if headers.get(name):
            return f"{name} {show(headers[name].removeprefix('W/'))}"  # proxies weaken it
    return ""


@contextmanager
def ask(
    method: str, url: str, headers: Mapping[str, str], home: str, where: str
) -> Iterator[tuple[Any, list[tuple[str, Mapping[str, str]]]]]:
    """Make a request, through redirects: the answer, its body not yet read; and the address and the headers of each hop.

    home  the only host to which `headers` may take a token

    Raises Again for what may pass, CheckpointError for what will not.
    """
    check_hub()  # whose client it is
    import huggingface_hub
    from huggingface_hub import constants, errors

    _keep_signatures_out_of_logs()
    try:
        with no_panic():
            client = huggingface_hub.get_session()
    except Exception as error:
        raise _failure(error, url, where) from error
    seconds = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    hops: list[tuple[str, Mapping[str, str]]] = []
    try:
        while True:
            hop_headers = {"Accept-Encoding": "identity", **headers}
            if _origin(url) != _origin(home):
                hop_headers = {
                    name: value for name, value in hop_headers.items() if name.lower() not in ("authorization", "cookie")
                }
            with no_panic():
                request = client.build_request(method, url, headers=hop_headers, timeout=seconds)
                response = client.send(request, stream=True, follow_redirects=False)
            try:
                hops.append((url, response.headers))
                if response.status_code not in _REDIRECTS:
                    yield response, hops
                    return
                url = _target(url, response.headers.get("location", ""), where)
                if len(hops) > _MAX_REDIRECTS:
                    raise CheckpointError(f"the server redirects more than {_MAX_REDIRECTS} times", where=where)
                if int(response.headers.get("content-length") or _MAX_DRAINED) < _MAX_DRAINED:
                    response.read()
            finally:
                response.close()
    except (WeightsmithError, Again):
        raise
    except errors.OfflineModeIsEnabled as error:
        fix = "Unset it, or name a local folder."
        raise CheckpointError("HF_HUB_OFFLINE=1 forbids reading it", where=where, fix=fix) from error
    except Exception as error:  # those of the client's package, whose name depends on huggingface_hub's version
        raise _failure(error, url, where) from error


class _WithoutQueries(logging.Filter):
    """Cuts the queries of addresses, which may be signed."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_queries(record.getMessage()), ()
        return True


@cache
def _keep_signatures_out_of_logs() -> None:
    """The client's package logs every address at level INFO. Loggers have no filters for those below them."""
    for version in ("", "2"):
        parts = ("connection", "http11", "http2", "proxy", "socks")
        for name in (f"httpx{version}", *(f"httpcore{version}.{part}" for part in parts)):
            logging.getLogger(name).addFilter(_WithoutQueries())


def check_status(response: Any, where: str) -> None:
    """Raise Again or CheckpointError for an answer that is no success."""
    status = response.status_code
    if status in (200, 206):
        return
    if passes(status):
        raise Again(f"the server answers with status {status}", _asked_seconds(response.headers))
    if status in (401, 403):
        fix = "Check that you may read it, and your token: `hf auth whoami`, or HF_TOKEN."
        raise CheckpointError(f"the server refuses to send it (status {status})", where=where, fix=fix)
    if status in (404, 410):
        what = f"the server no longer has it (status {status})"
        raise CheckpointError(what, where=where, fix="Check the address and the revision.")
    if status in (412, 416):
        what = f"the file has changed since it was first read (status {status})"
        raise CheckpointError(what, where=where, fix=CHANGED_FIX)
    raise CheckpointError(f"the server answers with status {status}", where=where)


def _pieces(response: Any, where: str) -> Iterator[bytes]:
    try:
        yield from response.iter_raw()
    except Exception as error:
        raise _failure(error, str(response.url), where) from error


def _failure(error: Exception, url: str, where: str) -> Exception:
    """A request without an answer. The text of the error is not shown: it may hold an address that is signed."""
    host, cause = urlsplit(url).hostname or "", error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner  # type: ignore[assignment]
    kind = type(error).__name__
    if stays := lasting(error):
        return CheckpointError(f"cannot be read from {host}: {without_queries(stays.what)}", where=where, fix=stays.fix)
    reason = f": {cause.strerror}" if isinstance(cause, OSError) and cause.strerror else ""
    return Again(f"no answer from {host} ({kind}{reason})")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _target(url: str, location: str, where: str) -> str:
    """The address that a redirect leads to."""
    target = urljoin(url, location)
    here, there = urlsplit(url), urlsplit(target)
    plain = here.scheme == there.scheme == "http" and (is_loopback(there.netloc) or _origin(target) == _origin(url))
    if not location or (there.scheme != "https" and not plain):
        what = f"the server redirects to an address that is not read: {show(target.partition('?')[0])}"
        raise CheckpointError(what, where=where)
    return target


def _asked_seconds(headers: Mapping[str, str]) -> float:
    """`Retry-After`, in seconds or as a date, which counts from the server's own clock; 0 if there is none."""
    asked = headers.get("retry-after", "").strip()
    if asked.isascii() and asked.isdigit():
        return min(float(asked), 1e6)
    date = email.utils.parsedate_tz(asked) if asked else None
    if date is None:
        return 0.0
    now = email.utils.parsedate_tz(headers.get("date", ""))
    return max(0.0, email.utils.mktime_tz(date) - (time.time() if now is None else email.utils.mktime_tz(now)))
