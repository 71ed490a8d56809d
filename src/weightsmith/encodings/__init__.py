"""How rows become stored bytes. One file for each encoding; `base.py` defines the interface."""

from __future__ import annotations

from weightsmith.encodings import fp8_dynamic, plain
from weightsmith.encodings.base import Encoding as Encoding
from weightsmith.errors import UnknownName, nearest


def find_encoding(name: str) -> Encoding:
    """The encoding of this name. Raises UnknownName."""
    if name not in ENCODINGS:
        raise UnknownName(f"unknown encoding '{name}'{nearest(name, ENCODINGS)}", fix=f"write one of {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


ENCODINGS: dict[str, Encoding] = {encoding.name: encoding for encoding in (plain.ENCODING, fp8_dynamic.ENCODING)}
"""Every encoding, by name.

>>> list(ENCODINGS)
['plain', 'fp8-dynamic']
"""
