"""Addresses of models: `hf://org/name`, `https://host/path/`, `s3://bucket/prefix`, `gs://…`, `az://container/path`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from weightsmith._base.errors import NotFound, ParameterError
from weightsmith._base.files import show

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
