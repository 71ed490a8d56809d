"""Variables of the environment that libraries read when they connect, checked before they do; errors name the variable."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from weightsmith._base.errors import NOTHING_WRITTEN, ParameterError

_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")
_FILES = {"s3": ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"), "gs": ("REQUESTS_CA_BUNDLE",), "az": ("REQUESTS_CA_BUNDLE",)}
"""Store → variables that name a file or a folder of certificates for it. SSL_CERT_FILE and SSL_CERT_DIR are for all clients."""
_SECONDS = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_text(name: str, value: str) -> str:
    """A key, token or other text for a header, as it is. Raises ParameterError, without the value, which may be a secret."""
    if _CONTROL.search(value):
        kind = "a line break" if re.search(r"[\r\n]", value) else "a control character"
        raise _wrong(name, f"holds {kind}, which no request can carry", "set it again, the text alone")
    if not value.isascii():
        raise _wrong(name, "holds a character that is not ASCII, which no request can carry", "set it again")
    return value


def check_url(name: str, value: str, schemes: tuple[str, ...] = ("https", "http")) -> str:
    """An address of a server, as it is; "" for none. Raises ParameterError, without what may be a password."""
    if not value:
        return value
    shown = re.sub(r"//[^/@]*@", "//...@", value.partition("?")[0])
    try:
        parts = urlsplit(check_text(name, value))
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise _wrong(name, f"is no address: {shown!r} ({error})", f"write {schemes[0]}://host:port") from error
    if parts.scheme.lower() not in schemes or not host or port == 0 or " " in value:
        known = " or ".join(f"{scheme}://" for scheme in schemes)
        fix = f"write {known}, a host, and a port from 1 to 65535 if it is not the usual one"
        raise _wrong(name, f"is no address: {shown!r}", fix)
    return value


def check_network(store: str = "") -> None:
    """Raise ParameterError for proxies and certificates that no client can use. store: s3, gs or az; "": the Hub, or https."""
    for name in _PROXIES:
        if value := os.environ.get(name, ""):
            check_url(name, value if "://" in value else f"http://{value}", _PROXY_SCHEMES)
    for name in ("NO_PROXY", "no_proxy"):
        check_text(name, os.environ.get(name, ""))
    for name in ("SSL_CERT_FILE", *_FILES.get(store, ())):
        value = os.environ.get(name, "")
        if value and not Path(value).is_file() and (name == "SSL_CERT_FILE" or not Path(value).is_dir()):
            raise _wrong(name, f"names no file: {value!r}", "correct it, or unset it")
    folders = os.environ.get("SSL_CERT_DIR", "")
    if folders and not any(Path(path).is_dir() for path in folders.split(os.pathsep)):
        raise _wrong("SSL_CERT_DIR", f"names no folder: {folders!r}", "correct it, or unset it")


def check_hub() -> None:
    """`check_network`, and what huggingface_hub reads when it is imported."""
    check_network()
    check_url("HF_ENDPOINT", os.environ.get("HF_ENDPOINT", ""))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        check_text(name, os.environ.get(name, "").strip())
    for name in _SECONDS:
        value = os.environ.get(name, "")
        if value and not re.fullmatch(r"\s*0*[1-9][0-9]{0,8}\s*", value, re.ASCII):
            raise _wrong(name, f"is no number of seconds: {value!r}", "write a whole number from 1 on, or unset it")


def _wrong(name: str, what: str, fix: str) -> ParameterError:
    return ParameterError(f"the variable of the environment {what}", where=name, fix=fix, state=NOTHING_WRITTEN)
