"""Records as JSON values and back: one walk for every dataclass of a plan, and of the settings of its products.

A record is an object with a key for each field. The JSON of a plan is untrusted: `decode` accepts only what the types of the
fields allow, and no unknown keys. A type whose JSON is not such an object has a `Form`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from weightsmith._base.errors import FormatError
from weightsmith._base.files import show
from weightsmith._files.subfolders import MAX_DEPTH

T = TypeVar("T")

OMITTED = {"omit": True}
"""Metadata of a field that is left out while it is empty or has its default."""


@dataclass(frozen=True, slots=True)
class Form:
    """A type with JSON of its own. decode: (value, its place in the plan) → the record. Raises as `invalid`."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any, str], Any]


FORMS: dict[Any, Form] = {}


def invalid(at: str, what: str) -> FormatError:
    """The error of a plan that no run could do."""
    return FormatError(f"invalid plan: {what}", where=at, fix="create the plan again: weightsmith plan RECIPE --json")


def check_name(name: str, at: str) -> None:
    """Raise FormatError unless this is the name of a file, without a folder."""
    if "/" in name or "\\" in name or name in ("", ".", ".."):
        raise invalid(at, f"{name!r} is not a file name")


def check_path(name: str, at: str) -> None:
    """Raise FormatError unless this is a relative path in a model's folder, `/` between folders."""
    parts = name.split("/")
    if len(parts) > MAX_DEPTH or "\0" in name:
        raise invalid(at, f"{name!r} is no file of a model")
    for part in parts:
        check_name(part, at)


def encode(value: Any) -> Any:
    """A record, or a value of its fields, as JSON values.

    >>> @dataclass
    ... class Point:
    ...     name: str
    ...     place: tuple[int, int]
    >>> encode(Point("a", (1, 2)))
    {'name': 'a', 'place': [1, 2]}
    """
    kind = type(value)
    if kind in (str, int, float, bool):
        return value
    if kind in FORMS:
        return FORMS[kind].encode(value)
    if is_dataclass(kind):
        return encode_record(value)
    if isinstance(value, tuple | list):
        return [encode(one) for one in value]
    return {key: encode(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def encode_record(record: Any) -> dict[str, Any]:
    """A record as an object, whatever its form."""
    data, kind = {}, record.__class__
    for name, key, omit, default in _keys(kind):
        value = getattr(record, name)
        if omit and (value is default or value == default or not (value or isinstance(value, int))):
            continue
        data[key] = value if value.__class__ in (str, int, bool) else encode(value)
    return data


def decode(kind: type[T], value: Any, at: str) -> T:
    """The inverse of `encode`. Raises FormatError for values that do not have the type.

    >>> decode(tuple[int, ...], [1, 2], "here")
    (1, 2)
    """
    hint: Any = kind  # types are hashable, which mypy does not know
    return _decoder(hint)(value, at)


def has_type(value: object, hint: Any) -> bool:
    """Whether a JSON value has a type: a scalar, `tuple[int, ...]` (list), `Mapping[str, X]`, `X | None`, a dataclass (object).

    >>> has_type([1, "a"], tuple[int, str]), has_type([1, "a"], tuple[int, ...]), has_type(True, int), has_type(1, float)
    (True, False, False, True)
    """
    try:
        _decoder(hint)(value, "")
    except FormatError:
        return False
    return True


def decode_record(kind: type[T], value: Any, at: str) -> T:
    """A record from an object, whatever its form."""
    return kind(**decode_fields(kind, value, at))


def decode_fields(kind: type, value: Any, at: str, *, open_keys: bool = False) -> dict[str, Any]:
    """The fields of a record from an object. open_keys: unknown keys are ignored."""
    record_type: Any = kind
    value, values = _object(value, at), {}
    for name, key, omit, _ in _keys(record_type):
        if key in value:
            values[name] = _decoder(_hints(record_type)[name])(value[key], f"{at}.{key}")
        elif not omit:
            raise invalid(at, f"{key!r} is missing")
    if len(values) < len(value) and not open_keys:
        raise invalid(at, f"unknown key {next(iter(value.keys() - {key for _, key, _, _ in _keys(record_type)}))!r}")
    return values


@cache
def _keys(kind: Any) -> tuple[tuple[str, str, bool, Any], ...]:
    """For each field: its name, its key, whether a default value is omitted, and the default."""
    initialised = [field for field in fields(kind) if field.init]
    return tuple(
        (field.name, field.metadata.get("key", field.name), "omit" in field.metadata, field.default) for field in initialised
    )


_hints = cache(get_type_hints)


def _object(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(at, f"expected dict, not {type(value).__name__}")
    return value


def _list(value: Any, at: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise invalid(at, f"expected list, not {type(value).__name__}")
    return value


@cache
def _decoder(hint: Any) -> Callable[[Any, str], Any]:
    """(value, place) → the value as this type."""
    if hint in FORMS:
        return FORMS[hint].decode
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(decode_record, hint)
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return partial(_one_of, frozenset(inner) & _SCALARS, [_decoder(option) for option in inner])
    if kind is Literal:
        return partial(_literal, inner)
    if kind is tuple:
        return partial(_many, _decoder(inner[0])) if inner[1:] == (...,) else partial(_row, [*map(_decoder, inner)])
    if kind in (Mapping, dict):
        return partial(_mapping, _decoder(inner[1]))
    if kind is float:
        return _number
    return (lambda value, _at: value) if kind is Any else partial(_scalar, kind)


_SCALARS = frozenset({str, int, bool, type(None)})


def _one_of(scalars: frozenset[type], decoders: list[Callable[[Any, str], Any]], value: Any, at: str) -> Any:
    if type(value) in scalars:
        return value
    error = None
    for one in decoders:
        try:
            return one(value, at)
        except FormatError as refusal:
            error = error or refusal
    assert error is not None
    raise error


def _literal(values: tuple[Any, ...], value: Any, at: str) -> Any:
    if not any(type(value) is type(one) and value == one for one in values):
        raise invalid(at, f"{value!r} is not one of {', '.join(map(str, values))}")
    return value


def _many(one: Callable[[Any, str], Any], value: Any, at: str) -> tuple[Any, ...]:
    return tuple(one(item, f"{at}[{i}]") for i, item in enumerate(_list(value, at)))


def _row(decoders: list[Callable[[Any, str], Any]], value: Any, at: str) -> tuple[Any, ...]:
    value = _list(value, at)
    if len(value) != len(decoders):
        raise invalid(at, f"expected {len(decoders)} values, not {len(value)}")
    return tuple(one(item, at) for one, item in zip(decoders, value, strict=True))


def _mapping(one: Callable[[Any, str], Any], value: Any, at: str) -> dict[str, Any]:
    return {key: one(item, f"{at}.{key}") for key, item in _object(value, at).items()}


def _number(value: Any, at: str) -> Any:
    try:
        finite = type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an int too large for a float
        finite = False
    if not finite:
        raise invalid(at, f"expected a finite number, not {show(value)}")
    return value


def _scalar(kind: type, value: Any, at: str) -> Any:
    if type(value) is not kind:  # type(None) is NoneType, which `X | None` holds
        raise invalid(at, f"expected {kind.__name__}, not {type(value).__name__}")
    return value
