"""JSON of unknown origin: one function, every failure a FormatError that names the file."""

from __future__ import annotations

import json
from typing import Any

from weightsmith.errors import FormatError
from weightsmith.formats.files import show


class _Duplicate(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    object_ = dict(pairs)
    if len(object_) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(key)
            seen.add(key)
    return object_


def parse_object(data: bytes, what: str, where: str, fix: str, *, unique: bool = True) -> dict[str, Any]:
    """The JSON object in `data`.

    what    names the text in messages: "the header"
    unique  refuse a name that appears twice in one object, instead of keeping the last

    Raises FormatError: not UTF-8, not JSON, not an object, nested too deeply, a name twice, lone surrogates (`\\ud800`
    is legal in JSON but no text, and could neither be printed nor written again).
    """

    def reject(problem: str) -> FormatError:
        return FormatError(f"{what} {problem}", where=where, fix=fix)

    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise reject(f"is not UTF-8: byte {data[error.start]:#04x} at byte {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique else None)
    except _Duplicate as error:
        raise reject(f"has the name {show(error.args[0])} twice in one JSON object") from error
    except RecursionError as error:
        raise reject("is JSON nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, or an integer of more than 4,300 digits
        raise reject(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise reject(f"is not a JSON object but {show(value)}")
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise reject("holds a lone surrogate, which is not text") from error
        except RecursionError as error:
            raise reject("is JSON nested too deeply") from error
    return value
