"""Stored formats: one folder for each, with what its bytes mean, how they are read and, for some, how they are written.

opening.py   how a model's weight files become plain tensors
config.py    what config.json says of quantisation
decoded.py   sources whose weights are decoded from codes on each read
matrices.py  encodings of weight matrices
numbers.py   small numbers and scales that several formats share

To add a format, add a folder with a `FORMAT`, and its name to `NAMES`; or a package with an entry point of the group
`weightsmith.formats`.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from weightsmith._base.errors import Finding, UnknownName, nearest
from weightsmith.abc.stored import Encoding as Encoding
from weightsmith.abc.stored import StoredFormat as StoredFormat

NAMES = (
    "plain", "compressed_tensors", "fp8", "gptq", "awq", "bitsandbytes", "exl2", "exl3", "gguf", "mlx", "modelopt",
)  # fmt: skip
"""weightsmith's formats. The first that recognises a model reads it."""

GROUP = "weightsmith.formats"
"""The entry points of packages that bring formats."""


@cache
def formats() -> tuple[StoredFormat, ...]:
    """Every format: weightsmith's, then those of installed packages.

    >>> [each.name for each in formats()][:3]
    ['plain', 'compressed_tensors', 'fp8']
    """
    return (*_ours(), *(each for each, _ in _installed() if isinstance(each, StoredFormat)))


@cache
def _ours() -> tuple[StoredFormat, ...]:
    return tuple(import_module(f"weightsmith._models.formats.{name}").FORMAT for name in NAMES)


def broken() -> tuple[Finding, ...]:
    """Why formats of installed packages cannot be used."""
    return tuple(each for each, _ in _installed() if isinstance(each, Finding))


def installed_code() -> tuple[str, ...]:
    """A digest of each format of an installed package: its code may change the bytes of an output (sha256, hex)."""
    return tuple(digest for _, digest in _installed())


@cache
def _installed() -> tuple[tuple[StoredFormat | Finding, str], ...]:
    """The formats that installed packages bring, or why they cannot be used, each with a digest of its package and module."""
    found: list[tuple[StoredFormat | Finding, str]] = []
    taken = {encoding.name for each in _ours() for encoding in each.encodings}
    for point in entry_points(group=GROUP):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
        label, fix = f"the stored format {point.name} of the package {package}", "reinstall or update the package"
        try:
            each = point.load()
        except Exception as error:
            each = Finding(f"{label} cannot be loaded: {type(error).__name__}: {error}", fix=fix)
        if not isinstance(each, StoredFormat | Finding):
            each = Finding(f"{label} is a {type(each).__name__}, not a StoredFormat", fix=fix)
        elif isinstance(each, StoredFormat):
            names = [encoding.name for encoding in each.encodings]
            if other := next((name for name in names if name in taken), ""):
                each = Finding(f"{label} has an encoding of another format: {other}", fix="remove the package")
            taken.update(names)
        file = getattr(sys.modules.get(point.module), "__file__", None)
        source = Path(file).read_bytes() if file else b""
        found.append((each, hashlib.sha256(package.encode() + b"\0" + source).hexdigest()))
    return tuple(found)


def encodings() -> dict[str, Encoding]:
    """Every encoding without a setting, by name.

    >>> list(encodings())[:4]
    ['plain', 'fp8-dynamic', 'fp8-block', 'int8']
    """
    return {encoding.name: encoding for each in formats() for encoding in each.encodings}


def find_encoding(name: str) -> Encoding:
    """The encoding of this name, which may have a setting: `exl2 4/g128`, `plain F16`. Raises UnknownName.

    >>> find_encoding("exl2 5@0.1/g128+4@0.9/g64").params.bits
    (5, 4)
    """
    known = encodings()
    if name in known:
        return known[name]
    try:
        found = next((made for each in formats() if (made := each.parse(name)) is not None), None)
    except ValueError:
        family, _, setting = name.partition(" ")
        raise UnknownName(f"encoding '{family}' has no setting '{setting}'") from None
    if found is not None:
        return found
    details = tuple(each.what for each in broken())
    fix = f"write one of {', '.join(known)}"
    raise UnknownName(f"unknown encoding '{name}'{nearest(name, known)}", details=details, fix=fix)
