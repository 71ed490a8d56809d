"""Reads a Plan from JSON values. The source is untrusted, so the type of every value is checked.

`planner.reopen` checks that a plan fits its inputs (blocks inside tensors, equal sizes).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from weightsmith.containers import CONTAINERS
from weightsmith.errors import Finding
from weightsmith.plans.draft import PlanDraft, invalid
from weightsmith.plans.values import (
    JOIN,
    PLAIN,
    Block,
    Dropped,
    FileRead,
    Gather,
    Made,
    ModelInput,
    OwnCode,
    Plan,
    Product,
    Read,
    Settings,
    Step,
    Table,
    Value,
    View,
)
from weightsmith.redaction import has_secret
from weightsmith.tensors import BLOCKS, DTYPES, TensorSpec

MAX_DIMENSIONS = 16
MAX_ELEMENTS = 1 << 62

T = TypeVar("T")
Json = dict[str, Any]


def plan_from_json(data: Any) -> Plan:
    """The inverse of `Plan.to_json`. Raises FormatError for invalid values."""
    return _Decoder().plan(_of(data, dict, "the plan")).finish()


def _recipe(data: Json) -> str:
    text = _text(data, "recipe", "plan")
    if has_secret(text):
        raise invalid("plan.recipe", "it holds a password, a token or a key, and would be stored with the model")
    return text


class _Decoder:
    """Reads values and tracks their position for messages."""

    def plan(self, data: Json) -> PlanDraft:
        config = _get(data, "config", "plan")
        lacking = _object(data, "lacking", "plan") if "lacking" in data else {}
        container = _text(data, "container", "plan")
        if container not in CONTAINERS:
            raise invalid("plan.container", f"{container!r} is not one of {', '.join(CONTAINERS)}")
        return PlanDraft(
            made=self._made(_object(data, "made", "plan")),
            models=list(self._model(m, at) for at, m in _objects(data, "models", "plan")),
            settings=list(self._settings(s, at) for at, s in _objects(data, "settings", "plan")),
            products=list(self._product(p, at) for at, p in _objects(data, "products", "plan")),
            tables=list(_table(_of(t, str, "plan.tables")) for t in _list(data, "tables", "plan")),
            steps=list(self.step(s, at) for at, s in _objects(data, "steps", "plan")),
            dropped=list(self._dropped(_of(d, list, "plan.dropped")) for d in _list(data, "dropped", "plan")),
            config=None if config is None else _of(config, dict, "plan.config"),
            donor=_int(data, "donor", "plan"),
            carried=list(_texts(data, "carried", "plan")),
            files={
                name: _binary(_of(text, str, "plan.other_files"), "plan.other_files")
                for name, text in (_object(data, "other_files", "plan") if "other_files" in data else {}).items()
            },
            lacking={name: _texts(lacking, name, "plan.lacking") for name in lacking},
            vocabulary=_object(data, "vocabulary", "plan") if "vocabulary" in data else None,
            container=container,
            header=_binary(_text(data, "header", "plan"), "plan.header") if "header" in data else b"",
            max_shard_bytes=_int(data, "max_shard_bytes", "plan", least=1),
            seed=_of(_get(data, "seed", "plan"), int, "plan.seed"),
            warnings=list(
                Finding(_text(w, "what", at), _text(w, "where", at), _texts(w, "details", at), _text(w, "fix", at))
                for at, w in _objects(data, "warnings", "plan")
            ),
            recipe=_recipe(data),
            follows_recipe="follows_recipe" not in data or _of(data["follows_recipe"], bool, "plan.follows_recipe"),
            then=_object(data, "then", "plan") if "then" in data else None,
        )

    def _model(self, data: Json, at: str) -> ModelInput:
        plan = plan_from_json(data["plan"]) if "plan" in data else None
        if plan is not None and (plan.products or plan.then is not None or any(step.encoding != PLAIN for step in plan.steps)):
            raise invalid(f"{at}.plan", "what is computed on the way has neither products nor encodings")
        return ModelInput(_text(data, "ref", at), _text(data, "revision", at), _text(data, "identity", at), plan)

    def _made(self, data: Json) -> Made:
        at = "plan.made"
        code = _get(data, "code", at)
        if code is not None:
            code = _of(code, dict, f"{at}.code")
            code = OwnCode(*(_text(code, key, f"{at}.code") for key in ("name", "folder", "sha256")))
        name, title, source, distance, relation, format_name = (
            _text(data, key, at) for key in ("name", "title", "source", "distance", "relation", "format")
        )
        return Made(name, title, source, distance, code, relation, format_name)

    def _settings(self, data: Json, at: str) -> Settings:
        models = tuple(_parameters(m, where) for where, m in _objects(data, "models", at))
        places = tuple(_of(p, int, f"{at}.places") for p in _list(data, "places", at))
        if places and (len(places) != len(models) or min(places) < 0):
            raise invalid(f"{at}.places", f"{list(places)} are not the places of {len(models)} inputs")
        return Settings(_parameters(_object(data, "shared", at), f"{at}.shared"), models, places)

    def _product(self, data: Json, at: str) -> Product:
        return Product(
            name=_text(data, "name", at),
            op=_text(data, "op", at),
            outs=tuple(_spec(_of(o, list, f"{at}.outs"), f"{at}.outs") for o in _list(data, "outs", at)),
            settings=_object(data, "settings", at),
            steps=tuple(self.step(s, where) for where, s in _objects(data, "steps", at)),
            models=tuple(_of(m, int, f"{at}.models") for m in _list(data, "models", at)),
            needs=_texts(data, "needs", at),
            files=tuple(self._file(_of(f, list, f"{at}.files"), f"{at}.files") for f in _list(data, "files", at)),
            transient=_of(data.get("transient", False), bool, f"{at}.transient"),
        )

    def _file(self, data: list[Any], at: str) -> FileRead:
        if len(data) != 3:
            raise invalid(at, "a file is [model, name, sha256]")
        name = _of(data[1], str, at)
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            raise invalid(at, f"{name!r} is not a file name")
        return FileRead(_of(data[0], int, at), name, _of(data[2], str, at))

    def _dropped(self, data: list[Any]) -> Dropped:
        if len(data) != 3:
            raise invalid("plan.dropped", "an entry is [model, tensor, reason]")
        return Dropped(*(_of(v, kind, "plan.dropped") for v, kind in zip(data, (int, str, str), strict=True)))

    def step(self, data: Json, at: str, *, piece: bool = False) -> Step:
        op = _text(data, "op", at)
        pieces = tuple(self.step(p, where, piece=True) for where, p in _objects(data, "pieces", at)) if "pieces" in data else ()
        if piece and (pieces or op == JOIN):
            raise invalid(at, "a piece cannot contain pieces")
        role = data.get("role", "other")
        if role not in ("linear", "vocabulary", "other"):
            raise invalid(f"{at}.role", f"{role!r} is not a role")
        return Step(
            out=_spec([_get(data, key, at) for key in ("name", "dtype", "shape")], at),
            op=op,
            inputs=tuple(self._read(_of(r, list, f"{at}.inputs"), f"{at}.inputs") for r in _list(data, "inputs", at)),
            base=_of(_get(data, "base", at), bool, f"{at}.base"),
            settings=_int(data, "settings", at),
            pieces=pieces,
            needs=_texts(data, "needs", at) if "needs" in data else (),
            role=role,
            layer=_text(data, "layer", at) if "layer" in data else "",
            encoding=_text(data, "encoding", at) if "encoding" in data else PLAIN,
            stored=tuple(_spec(_of(s, list, at), at) for s in _list(data, "stored", at)) if "stored" in data else (),
            weighted=_int(data, "weighted", at) if "weighted" in data else -1,
        )

    def _read(self, data: list[Any], at: str) -> Read:
        if len(data) < 2:
            raise invalid(at, "a read is [model, tensor], optionally with a view")
        return Read(_of(data[0], int, at), _of(data[1], str, at), self._view(data[2:], at))

    def _view(self, data: list[Any], at: str) -> View | None:
        if not data:
            return None
        if len(data) == 1:
            gather = _of(data[0], dict, at)
            table = _get(gather, "table", at)
            if not isinstance(table, str) and (isinstance(table, bool) or not isinstance(table, int) or table < 0):
                raise invalid(at, "a table is an index or a product's array")
            axis = _int(gather, "axis", at)
            if axis not in (0, 1):
                raise invalid(at, "an axis must be 0 or 1")
            block = _block(_list(gather, "block", at), at)
            if not block.whole_rows:
                raise invalid(at, "a gathered block must be contiguous")
            fallback = (
                tuple(self._read(_of(r, list, at), at) for r in _list(gather, "fallback", at)) if "fallback" in gather else ()
            )
            if any(not _is_fallback(other) for other in fallback) or (fallback and (axis or isinstance(table, str))):
                raise invalid(at, "a fallback must be rows, gathered by a table of the plan")
            return Gather(table, block, cast("Any", axis), fallback)
        return _block(data, at)


def _is_fallback(read: Read) -> bool:
    view = read.view
    return isinstance(view, Gather) and isinstance(view.table, int) and view.axis == 0 and not view.fallback


def has_type(value: object, hint: Any) -> bool:
    """Whether a JSON value has a type: a scalar, `tuple[int, ...]` (list), `Mapping[str, X]`, `X | None`, a dataclass (object).

    >>> has_type([1, "a"], tuple[int, str]), has_type([1, "a"], tuple[int, ...]), has_type(True, int), has_type(1, float)
    (True, False, False, True)
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return isinstance(value, dict) and value.keys() == hints.keys() and all(has_type(value[k], h) for k, h in hints.items())
    if kind in (Union, UnionType):
        return any(has_type(value, one) for one in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        if not isinstance(value, list | tuple):
            return False
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(kinds) == len(value) and all(map(has_type, value, kinds))
    if kind is Mapping:
        return isinstance(value, dict) and all(has_type(v, inner[1]) for v in value.values())
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return kind is Any or type(value) is kind  # type(None) is NoneType, which `X | None` holds


def _of(value: Any, kind: type[T], at: str) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise invalid(at, f"expected {kind.__name__}, not {type(value).__name__}")
    return value


def _get(data: Mapping[str, Any], key: str, at: str) -> Any:
    if key not in data:
        raise invalid(at, f"{key!r} is missing")
    return data[key]


def _text(data: Mapping[str, Any], key: str, at: str) -> str:
    return _of(_get(data, key, at), str, f"{at}.{key}")


def _int(data: Mapping[str, Any], key: str, at: str, least: int = 0) -> int:
    value = _of(_get(data, key, at), int, f"{at}.{key}")
    if not least <= value <= MAX_ELEMENTS:
        raise invalid(f"{at}.{key}", f"{value} is out of range")
    return value


def _list(data: Mapping[str, Any], key: str, at: str) -> list[Any]:
    return _of(_get(data, key, at), list, f"{at}.{key}")


def _texts(data: Mapping[str, Any], key: str, at: str) -> tuple[str, ...]:
    return tuple(_of(value, str, f"{at}.{key}") for value in _list(data, key, at))


def _object(data: Mapping[str, Any], key: str, at: str) -> Json:
    return _of(_get(data, key, at), dict, f"{at}.{key}")


def _objects(data: Mapping[str, Any], key: str, at: str) -> list[tuple[str, Json]]:
    return [(f"{at}.{key}[{i}]", _of(v, dict, f"{at}.{key}[{i}]")) for i, v in enumerate(_list(data, key, at))]


def _spec(data: list[Any], at: str) -> TensorSpec:
    if len(data) != 3:
        raise invalid(at, "a tensor is [name, dtype, shape]")
    name, dtype, shape = _of(data[0], str, at), _of(data[1], str, at), _of(data[2], list, at)
    if dtype not in DTYPES and dtype not in BLOCKS:
        raise invalid(at, f"{dtype!r} is not a dtype")
    sizes = tuple(_of(n, int, at) for n in shape)
    spec = TensorSpec(name, DTYPES.get(dtype) or BLOCKS[dtype], sizes)
    if len(sizes) > MAX_DIMENSIONS or any(n < 0 for n in sizes) or spec.size > MAX_ELEMENTS:
        raise invalid(at, f"{list(sizes)} is not a shape")
    return spec


def _block(data: list[Any], at: str) -> Block:
    if len(data) != 4 or any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= MAX_ELEMENTS for n in data):
        raise invalid(at, "a block is [offset, rows, cols, stride]")
    return Block(*data)


def _table(text: str) -> Table:
    data = _binary(text, "plan.tables")
    if len(data) % 4:
        raise invalid("plan.tables", "a table must be numbers of 4 bytes in base64")
    return Table(data)


def _binary(text: str, at: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise invalid(at, "it is not base64") from None


def _parameters(data: Json, at: str) -> dict[str, Value | None]:
    for key, value in data.items():
        if value is not None and not isinstance(value, bool | int | float | str):
            raise invalid(f"{at}.{key}", "a parameter must be a number, a string, true, false or null")
    return data
