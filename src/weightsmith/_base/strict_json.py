"""JSON of unknown origin: the one reader of it, with bounds. Every failure is a FormatError that names the file.

Whoever gets a value from here may walk it recursively, copy it, print it with `show`, and make a float of any of its integers.
Its types are still unknown: `structure.configs` reads single values of a config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._base.files import read_bounded, show

MAX_DEPTH = 64
"""Objects and lists inside each other; what libraries write has up to ten."""

MAX_MEMORY = 400 << 20
"""Bytes that a text and its values may take: 180,000 tensors of a safetensors header, 700,000 of an index."""

MAX_DIGITS = 300
"""Digits of an integer: float() takes those and no longer ones."""

_AS_ZEROS = bytes(0x30 if chr(code).isdigit() else 0x20 for code in range(128)) + b" " * 128
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """What is wrong with a text, as the end of a sentence that begins with its name."""


def parse(data: bytes, *, unique: bool = True, max_memory: int = MAX_MEMORY) -> Any:
    r"""The JSON value in `data`; NaN and Infinity are floats, as in Python's own reader.

    unique      refuse a name that appears twice in one object, instead of keeping the last
    max_memory  bytes that text and values may take

    Raises JsonError: not UTF-8, not JSON, more than that, `MAX_DEPTH` or `MAX_DIGITS`, a name twice, lone surrogates
    (`\ud800` is legal in JSON but no text, and could neither be printed nor written again).

    >>> parse(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> parse(b"[" * 65 + b"]" * 65)
    Traceback (most recent call last):
    weightsmith._base.strict_json.JsonError: is JSON nested too deeply: more than 64 levels
    """
    if (memory := _memory(data)) > max_memory:
        raise JsonError(f"would take up to {memory >> 20:,} MiB of memory: at most {max_memory >> 20:,} are allowed")
    long_number = b"0" * (MAX_DIGITS + 1) in data.translate(_AS_ZEROS)
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_unique if unique else None, parse_int=_short_int if long_number else None
        )
    except UnicodeDecodeError as error:
        raise JsonError(f"is not UTF-8: byte {data[error.start]:#04x} at byte {error.start}") from error
    except JsonError:
        raise
    except RecursionError as error:
        raise JsonError(f"is JSON nested too deeply: more than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise JsonError(f"is not JSON: {error}") from error
    if _is_deep(value):
        raise JsonError(f"is JSON nested too deeply: more than {MAX_DEPTH} levels")
    if _SURROGATE.search(data) and any(map(_is_no_text, texts(value))):
        raise JsonError("holds a lone surrogate, which is not text")
    return value


def parse_json(data: bytes) -> Any:
    """The JSON value in bytes that someone else wrote; see `parse`. Raises a ValueError whose text goes on from "the file"."""
    return parse(data)


def parse_object(
    data: bytes, what: str, where: str, fix: str, *, unique: bool = True, max_memory: int = MAX_MEMORY
) -> dict[str, Any]:
    """The JSON object in `data`; see `parse`. Raises FormatError.

    what  names the text in messages: "the header"
    """
    try:
        value = parse(data, unique=unique, max_memory=max_memory)
    except JsonError as error:
        raise FormatError(f"{what} {error}", where=where, fix=fix) from error
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object but {show(value)}", where=where, fix=fix)
    return value


def read_object(
    path: Path, max_bytes: int, what: str, fix: str, *, unique: bool = True, max_memory: int = MAX_MEMORY
) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes`; see `parse_object`. Raises what `read_bounded` raises too."""
    return parse_object(read_bounded(path, max_bytes), what, str(path), fix, unique=unique, max_memory=max_memory)


def texts(value: object) -> Iterator[str]:
    """Every text in a value, keys among them."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            todo += value
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _memory(data: bytes) -> int:
    """A bound of the bytes that a text takes with its values: 80 for a value, 80 more for a list or object, 240 for a name."""
    wide = not data.isascii() or b"\\u" in data  # Python stores a text with one emoji in four bytes a character
    text = len(data) * (10 if wide else 3)
    return text + 80 * sum(map(data.count, (b",", b"[", b"{"))) + 240 * data.count(b":")


def _is_deep(value: object) -> bool:
    """More than MAX_DEPTH levels. Level by level: the value may be too deep for recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        dicts = [item for item in level if type(item) is dict]
        lists = [item for item in level if type(item) is list]
        if {dict, list}.isdisjoint(map(type, _members(dicts, lists))):  # a header of 100,000 tensors: a tenth of the time
            return False
        level = [item for item in _members(dicts, lists) if type(item) is dict or type(item) is list]
    return True


def _members(dicts: list[dict[str, Any]], lists: list[list[Any]]) -> Iterator[Any]:
    return chain(chain.from_iterable(map(dict.values, dicts)), chain.from_iterable(lists))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    object_ = dict(pairs)
    if len(object_) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"has the name {show(key)} twice in one JSON object")
            seen.add(key)
    return object_


def _short_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise JsonError(f"has an integer of {len(text):,} digits: at most {MAX_DIGITS} are read")
    return int(text)


def _is_no_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
