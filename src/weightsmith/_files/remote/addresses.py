"""Addresses of models: `hf://org/name`, `https://host/path/`, `s3://bucket/prefix`, `gs://…`, `az://container/path`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from weightsmith._base.errors import NOTHING_WRITTEN, NotFound, ParameterError
from weightsmith._base.files import show

# ---- Variables of the environment that libraries read when they connect, checked before they do; errors name the variable


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


HUB = "hf"
STORES = ("s3", "gs", "az")
SCHEMES = (HUB, "https", *STORES)
_HOST = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?", re.ASCII)
_PAGES = ("huggingface.co", "www.huggingface.co", "hf.co")
"""Hosts of pages about models; files are under `resolve` there."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Address:
    """The place of a model, or of one of its files.

    scheme  one of `SCHEMES`; "http" for this machine
    host    with the port; the bucket, or the container; "" for the Hub
    path    without slashes at its ends
    """

    scheme: str
    host: str
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://" + "/".join(part for part in (self.host, self.path) if part)

    def url(self, name: str = "") -> str:
        """The address of a file of the folder, quoted; of the place itself if there is no name."""
        return f"{self.scheme}://{self.host}/" + quote("/".join(part for part in (self.path, name) if part))


def is_address(name: str) -> bool:
    """True for a name that can be nothing but an address.

    >>> is_address("s3://models/llama"), is_address("org/name")
    (True, False)
    """
    return "://" in name


def parse_address(name: str) -> Address:
    """What an address names. Raises NotFound for a scheme that is not read, ParameterError for what no address may hold.

    >>> parse_address("s3://models/llama/")
    Address(scheme='s3', host='models', path='llama')
    """
    scheme, _, rest = name.partition("://")
    scheme = scheme.lower()
    shown = f"{scheme}://{rest.rpartition('@')[2]}".partition("?")[0]  # no key or password in a message
    if scheme == "http" and not is_loopback(rest):
        raise ParameterError("http is read from this machine alone: it is not encrypted", where=shown, fix="write https://")
    if scheme not in (*SCHEMES, "http"):
        known = ", ".join(f"{known_scheme}://" for known_scheme in SCHEMES)
        raise NotFound(f"addresses of the scheme {show(scheme)} are not read", where=shown, fix=f"use one of {known}")
    if "?" in rest or "#" in rest or "@" in rest.partition("/")[0]:
        what = "an address holds no user, password, query or fragment"
        raise ParameterError(what, where=shown, fix="give keys by the environment: see docs/remote.md")
    if scheme == HUB:
        path = rest.strip("/")
        if path.count("/") != 1:
            fix = "write hf://org/name[@revision]; files and folders of a repository have no address"
            raise ParameterError("not the name of a model on the Hub", where=shown, fix=fix)
        return Address(scheme, "", path)
    host, _, path = rest.partition("/")
    good = (_BUCKET if scheme in STORES else _HOST).fullmatch(host)
    parts = path.rstrip("/").split("/") if path.rstrip("/") else []
    if not good or any(part in ("", ".", "..") or not part.isprintable() or "\\" in part for part in parts):
        raise ParameterError("not the address of a folder", where=shown, fix=f"write {scheme}://place/folder")
    if host.lower() in _PAGES and "resolve" not in parts:
        fix = "Write a Hub model as org/name, or as hf://org/name to stream it."
        raise NotFound("this is the page of a model, not a folder of files", where=shown, fix=fix)
    return Address(scheme, host, "/".join(parts))


def is_loopback(place: str) -> bool:
    """True for a host, with anything after it, that is this machine.

    >>> is_loopback("127.0.0.1:9000/x"), is_loopback("127.0.0.1.example.org")
    (True, False)
    """
    try:
        return urlsplit(f"//{place}").hostname in ("127.0.0.1", "localhost", "::1")
    except ValueError:
        return False


def is_file_name(name: str) -> bool:
    """True for a relative name, `/` between folders, that is no other place in disguise.

    >>> list(map(is_file_name, ("model.safetensors", "a/b.json", "../x", "/etc/passwd", "a//b", "a\\\\b")))
    [True, True, False, False, False, False]
    """
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and ":" not in name and all(part not in ("", ".", "..") for part in parts)
