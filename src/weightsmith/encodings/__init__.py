"""How rows become stored bytes. One file for each encoding; `base.py` defines the interface."""

from __future__ import annotations

from collections.abc import Callable

from weightsmith.encodings import exl2, fp8_block, fp8_dynamic, gguf, int8, mlx, mxfp4, nvfp4, packed, plain
from weightsmith.encodings.base import Encoding as Encoding
from weightsmith.errors import UnknownName, nearest


def find_encoding(name: str) -> Encoding:
    """The encoding of this name, which may have a setting: `exl2 4/g128`, `plain F16`. Raises UnknownName.

    >>> find_encoding("exl2 5@0.1/g128+4@0.9/g64").params.bits
    (5, 4)
    """
    if found := gguf.find(name):
        return found
    family, _, setting = name.partition(" ")
    if setting and family in _PARSERS:
        try:
            return _PARSERS[family](name)
        except ValueError:
            raise UnknownName(f"encoding '{family}' has no setting '{setting}'") from None
    if name not in ENCODINGS:
        raise UnknownName(f"unknown encoding '{name}'{nearest(name, ENCODINGS)}", fix=f"write one of {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


_PARSERS: dict[str, Callable[[str], Encoding]] = {"exl2": exl2.parse, "plain": plain.parse}
"""Families of encodings with a setting."""

_SINGLE: tuple[Encoding, ...] = (
    plain.ENCODING,
    fp8_dynamic.ENCODING,
    fp8_block.ENCODING,
    int8.ENCODING,
    nvfp4.ENCODING,
    mxfp4.ENCODING,
)
_FAMILIES: tuple[Encoding, ...] = (*packed.ENCODINGS, *mlx.ENCODINGS)

ENCODINGS: dict[str, Encoding] = {encoding.name: encoding for encoding in (*_SINGLE, *_FAMILIES)}
"""Every encoding without a setting, by name. Those of GGUF files are not listed: `gguf.find`.

>>> list(ENCODINGS)[:4]
['plain', 'fp8-dynamic', 'fp8-block', 'int8']
"""
