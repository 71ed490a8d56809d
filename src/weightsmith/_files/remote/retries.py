"""Requests that failed and may succeed: made again, within the bounds of `PATIENCE`, which all parts of the program share.

Whether one may succeed is for `failures` to say. A run of bytes is asked for again from where it stopped.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from weightsmith._base.errors import CheckpointError, first_line

# ---- What a failed request means, whoever made it: may it succeed when it is made again, or not?


_PASSING = frozenset({408, 425, 429})
_LASTING = frozenset({501, 505})


class Panicked(Exception):
    """A library raised what is no `Exception`, as extensions in Rust do when they panic."""


class Lasting(NamedTuple):
    """Why a request cannot succeed when it is made again, and what to correct."""

    what: str
    fix: str


def passes(status: int) -> bool:
    """Whether a request that was answered with this status may succeed when it is made again.

    >>> [status for status in (400, 403, 404, 408, 416, 425, 429, 500, 501, 503, 505) if passes(status)]
    [408, 425, 429, 500, 503]
    """
    return status in _PASSING or (status >= 500 and status not in _LASTING)


@contextmanager
def no_panic() -> Iterator[None]:
    """Raise Panicked for a panic of a library, which would pass every `except Exception`; Ctrl-C and exits pass."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise Panicked(f"{type(error).__name__}: {first_line(error)}") from error


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it, each once."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        inner = [
            inner_error
            for inner_error in (*cause.args, getattr(cause, "reason", None))
            if isinstance(inner_error, BaseException)
        ]  # urllib3's
        cause = cause.__cause__ or cause.__context__ or (inner[0] if inner else None)


_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED|invalid peer certificate|certificate verify failed", re.IGNORECASE)
_NO_TLS = re.compile(r"WRONG_VERSION_NUMBER|InvalidContentType|corrupt message", re.IGNORECASE)
_NO_NAME = re.compile(r"Name or service not known|No address associated with hostname|nodename nor servname")
_ADDRESS = re.compile(
    r"builder error|InvalidPort|invalid port|URL scheme is not allowed|InvalidUri|relative URL without a base"
)
_CLASSES = frozenset(
    "UnsupportedProtocol LocalProtocolError InvalidURL InvalidSchema MissingSchema InvalidProxyURL InvalidHeader "
    "ProxySchemeUnknown ProxySchemeUnsupported LocationParseError InvalidProxiesConfigError UnsupportedProxyProtocolError "
    "InvalidDNSNameError ParamValidationError UnknownRegionError InvalidRegionError EndpointProviderError".split()
)
"""Errors of the clients themselves: no server has seen the request."""
_OWN_MISTAKES = (ValueError, TypeError, ImportError, AttributeError)


def lasting(error: BaseException, endpoint: str = "the address") -> Lasting | None:
    """What stays wrong with a request that got no answer; None if it may pass.

    endpoint  what to check, such as a variable of the environment

    >>> import socket
    >>> lasting(socket.gaierror(socket.EAI_NONAME, "Name or service not known")).what
    'the host does not exist (Name or service not known)'
    >>> lasting(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")) is None
    True
    >>> lasting(ConnectionResetError()) is None
    True
    """
    import socket  # here: `--help` needs no network
    import ssl

    chain = [*causes(error)]
    text = " ".join(str(cause) for cause in chain)
    if _CERTIFICATE.search(text) or any(isinstance(cause, ssl.SSLCertVerificationError) for cause in chain):
        fix = "name that of a proxy which replaces it in SSL_CERT_FILE (S3: AWS_CA_BUNDLE; GCS, Azure: REQUESTS_CA_BUNDLE)"
        return Lasting("the certificate is not trusted (TLS)", fix)
    if _NO_TLS.search(text):
        return Lasting("the server does not speak TLS there", f"check {endpoint}: its port and https or http")
    if any(isinstance(cause, socket.gaierror) for cause in chain) or "name resolution" in text or _NO_NAME.search(text):
        if not _NO_NAME.search(text):
            return None
        return Lasting(f"the host does not exist ({_NO_NAME.findall(text)[0]})", f"check {endpoint} and the network")
    for cause in chain:
        if isinstance(cause, ssl.SSLError) and "NO_CERTIFICATE" in str(cause):
            return Lasting(f"its certificates cannot be read: {first_line(cause)}", "correct SSL_CERT_FILE")
        if isinstance(cause, FileNotFoundError | IsADirectoryError | PermissionError):
            return Lasting(f"a file of its settings cannot be read: {first_line(cause)}", "correct the variable that names it")
    unsent = [cause for cause in chain if isinstance(cause, Panicked) or type(cause).__name__ in _CLASSES]
    mistaken = [] if any(map(_was_sent, chain)) else [cause for cause in chain if isinstance(cause, _OWN_MISTAKES)]
    if unsent or mistaken or _ADDRESS.search(text):
        why = (unsent or mistaken or chain)[-1]
        return Lasting(
            f"the request cannot be sent ({type(why).__name__}: {first_line(why)})", f"check {endpoint} and the keys"
        )
    return None


def _was_sent(error: BaseException) -> bool:
    """The connection failed, or the answer ended early: clients read the size of a part that never came, a ValueError."""
    return isinstance(error, OSError) or type(error).__name__ in ("ProtocolError", "RemoteProtocolError", "IncompleteRead")


_Result = TypeVar("_Result")
Put = Callable[[int, bytes], None]
"""Takes in bytes, and where they begin in the file."""


class Again(Exception):
    """A request failed, and may succeed when it is made again. wait_seconds: that the server asks for."""

    def __init__(self, why: str, wait_seconds: float = 0.0) -> None:
        super().__init__(why)
        self.why = why
        self.wait_seconds = wait_seconds


class Stopped(Exception):
    """Nobody waits for the bytes any more."""


class Ranges(Protocol):
    """The bytes of one file on a server. Thread-safe.

    where    for messages
    nbytes   size of the file
    version  equal for equal content
    """

    where: str
    nbytes: int
    version: str

    def request(self, first: int, end: int) -> Iterator[bytes]:
        """Make one request for bytes first … end, and yield them; never others, and never more.

        Raises Again for what may pass, CheckpointError for what will not: the file has changed, or may not be read.
        """

    def check_parts(self) -> None:
        """Raise CheckpointError if the requests so far have shown that parts of the file cannot be had."""

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file has changed since it was first read, Again for what may pass."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long.

    failures        in a row, without `progress_bytes` between them
    first_seconds   wait after the first failure; twice as long after each other one
    most_seconds    longest wait
    asked_seconds   longest wait that a server may ask for
    slow_seconds    a request that brings fewer than `slow_bytes` per second for so long is given up
    """

    failures: int = 8
    progress_bytes: int = 64 << 10
    first_seconds: float = 0.5
    most_seconds: float = 20.0
    asked_seconds: float = 120.0
    slow_seconds: float = 30.0
    slow_bytes: int = 16 << 10

    def delay(self, failures: int, error: Exception) -> float:
        """Seconds to wait after so many failures in a row, the last of which was `error`; at least what a server asks for."""
        delay = min(self.most_seconds, self.first_seconds * 2.0 ** (failures - 1))
        asked = error.wait_seconds if isinstance(error, Again) else 0.0
        return max(asked, delay * random.uniform(0.5, 1.0))  # not all connections at the same moment


PATIENCE = Patience()


def retry(call: Callable[[], _Result], may_pass: Callable[[Exception], bool], patience: Patience | None = None) -> _Result:
    """Call until it does not raise what may pass, within the bounds of a patience (default: `PATIENCE`)."""
    patience = patience or PATIENCE
    for failures in range(1, patience.failures + 1):
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            time.sleep(patience.delay(failures, error))
    return call()


def retry_request(call: Callable[[], None], where: str) -> None:
    """Call until it does not raise Again. Raises CheckpointError after too many failures."""
    try:
        retry(call, lambda error: isinstance(error, Again) and error.wait_seconds <= PATIENCE.asked_seconds)
    except Again as error:
        raise _given_up(error, where) from error


def fetch(ranges: Ranges, first: int, end: int, put: Put, stop: threading.Event | None = None) -> None:
    """Hand bytes first … end to `put`, in order, each once.

    Raises CheckpointError when the file has changed or may not be read, and after `PATIENCE.failures` failures without
    progress; Stopped once `stop` is set.
    """
    at, failures, counted = first, 0, first
    while at < end:
        begun, asked = time.monotonic(), at
        try:
            for piece in ranges.request(at, end):
                if stop is not None and stop.is_set():
                    raise Stopped
                put(at, piece)
                at += len(piece)
                taken = time.monotonic() - begun
                if taken > PATIENCE.slow_seconds and at - asked < PATIENCE.slow_bytes * taken and at < end:
                    raise Again(f"{at - asked:,} bytes came in {taken:.0f} s")
            if at < end:
                raise Again(f"the answer ended after {at - asked:,} of {end - asked:,} bytes")
        except Again as error:
            if at - counted >= PATIENCE.progress_bytes:
                failures, counted = 0, at
            failures += 1
            if failures > PATIENCE.failures or error.wait_seconds > PATIENCE.asked_seconds:
                raise _given_up(error, ranges.where) from error
            delay = PATIENCE.delay(failures, error)
            if stop is None:
                time.sleep(delay)
            elif stop.wait(delay):
                raise Stopped from None


def fetch_into(ranges: Ranges, first: int, out: memoryview, stop: threading.Event | None = None) -> None:
    """Fill `out` with the bytes from `first` on. Raises as `fetch`."""

    def put(at: int, piece: bytes) -> None:
        out[at - first : at - first + len(piece)] = piece

    fetch(ranges, first, first + len(out), put, stop)


def _given_up(error: Again, where: str) -> CheckpointError:
    """The error for bytes that are not asked for again."""
    if error.wait_seconds > PATIENCE.asked_seconds:
        what = f"cannot be read now: {error.why}, and the server asks to wait {error.wait_seconds:,.0f} s"
        return CheckpointError(what, where=where, fix="Run the same command again later to resume.")
    what = f"cannot be read: {error.why}, after {PATIENCE.failures} more attempts"
    return CheckpointError(what, where=where, fix="Check the network, and run the same command again to resume.")
