"""What a failed request means, whoever made it: may it succeed when it is made again, or not?

The one table of what passes, for http, object stores and the Hub. Libraries wrap errors in their own classes, some of which
are no `Exception`; what counts is found along the chain of causes.

    an answer      408, 425, 429 and 5xx pass, but not 501 and 505; all else stays
    no answer      passes, but for what `lasting` knows: a certificate, a name that does not exist, an address or a header
                   that no client can send, a setting that names no file, a panic of a library
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from weightsmith._base.errors import first_line

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
