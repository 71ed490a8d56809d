"""Plans from JSON, and the parts of a plan whose JSON is not an object with a key for each field.

`planner.reopen` checks that a plan fits its inputs (blocks inside tensors, equal sizes).
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, Self

from weightsmith._base.redaction import has_secret
from weightsmith._base.tensors import BLOCKS, DTYPES, TensorSpec
from weightsmith._files.containers import CONTAINERS
from weightsmith._plans.codec import (
    FORMS,
    Form,
    check_name,
    decode,
    decode_fields,
    decode_record,
    encode,
    encode_record,
    has_type,
    invalid,
)
from weightsmith._plans.draft import PlanDraft
from weightsmith._plans.values import Block, Dropped, FileRead, Gather, Plan, Product, Read, Step, Table, View
from weightsmith._version import __version__

MAX_DIMENSIONS = 16
MAX_ELEMENTS = 1 << 62

_SPEC = "name", "dtype", "shape"
_ORDER = ("provenance", "models", "settings", "products", "tables", "steps")
"""The first keys of a plan; the others are in the order of its fields."""


class ProductSettings(ABC):
    """Base of the records that are the settings of a product."""

    __slots__ = ()

    @classmethod
    def of(cls, product: Product) -> Self:
        """From the settings of a product. Raises FormatError."""
        return decode(cls, product.settings, f"product {product.name}")

    def to_json(self) -> dict[str, Any]:
        """The settings of a product."""
        data: dict[str, Any] = encode(self)
        return data

    @classmethod
    def check(cls, product: Product) -> str:
        """Why a product is invalid, or "": `ProductKind.check`."""
        if not has_type(product.settings, cls):
            return f"its settings are not those of a {product.op} product"
        return cls.of(product).problem(product, {step.out.name: step.out.shape for step in product.steps})

    @abstractmethod
    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Why a product with these settings is invalid, or "". shapes: of its steps"""


def plan_from_json(data: Any) -> Plan:
    """The inverse of `Plan.to_json`. Keys of no field are ignored. Raises FormatError for invalid values, and StoreError."""
    values = decode_fields(Plan, data, "plan", open_keys=True)
    if values["container"] not in CONTAINERS:
        raise invalid("plan.container", f"{values['container']!r} is not one of {', '.join(CONTAINERS)}")
    if not 1 <= values["max_shard_bytes"] <= MAX_ELEMENTS:
        raise invalid("plan.max_shard_bytes", f"{values['max_shard_bytes']} is out of range")
    if has_secret(values["recipe"]):
        raise invalid("plan.recipe", "it holds a password, a token or a key, and would be stored with the model")
    values |= {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
    return PlanDraft(**values).finish()


def _encode_plan(plan: Plan) -> dict[str, Any]:
    data = encode_record(plan)
    return {"weightsmith": __version__, **{key: data[key] for key in _ORDER}, **data}


def _decode_spec(value: Any, at: str) -> TensorSpec:
    name, dtype, shape = decode(tuple[str, str, tuple[int, ...]], value, at)
    if dtype not in DTYPES and dtype not in BLOCKS:
        raise invalid(at, f"{dtype!r} is not a dtype")
    spec = TensorSpec(name, DTYPES.get(dtype) or BLOCKS[dtype], shape)
    if len(shape) > MAX_DIMENSIONS or any(n < 0 for n in shape) or spec.size > MAX_ELEMENTS:
        raise invalid(at, f"{list(shape)} is not a shape")
    return spec


def _encode_step(step: Step) -> dict[str, Any]:
    data = encode_record(step)
    return {**dict(zip(_SPEC, data.pop("out"), strict=True)), **data}


def _decode_step(value: Any, at: str) -> Step:
    data = decode(dict[str, Any], value, at)
    if missing := [key for key in _SPEC if key not in data]:
        raise invalid(at, f"{missing[0]!r} is missing")
    rest = {key: one for key, one in data.items() if key not in _SPEC}
    step = decode_record(Step, {"out": [data[key] for key in _SPEC], **rest}, at)
    for key in ("settings", "weighted"):
        if key in data and not 0 <= data[key] <= MAX_ELEMENTS:
            raise invalid(f"{at}.{key}", f"{data[key]} is out of range")
    return step


def _encode_read(read: Read) -> list[Any]:
    view = read.view
    place = [] if view is None else encode(view) if isinstance(view, Block) else [encode(view)]
    return [read.model, read.tensor, *place]


def _decode_read(value: Any, at: str) -> Read:
    if not isinstance(value, list) or len(value) < 2 or type(value[0]) is not int or not isinstance(value[1], str):
        raise invalid(at, "a read is [model, tensor], optionally with a view")
    model, tensor, *view = value
    decoded: View | None = None
    if view:
        decoded = decode(Gather, view[0], at) if len(view) == 1 else decode(Block, view, at)
    return Read(model, tensor, decoded)


def _decode_block(value: Any, at: str) -> Block:
    data = value if isinstance(value, list) else ()
    if len(data) != 4 or any(type(n) is not int or not 0 <= n <= MAX_ELEMENTS for n in data):
        raise invalid(at, "a block is [offset, rows, cols, stride]")
    return Block(*data)


def _encode_gather(view: Gather) -> dict[str, Any]:
    return {"table": view.table, "axis": view.axis, **encode_record(view)}


def _decode_gather(value: Any, at: str) -> Gather:
    view = decode_record(Gather, value, at)
    if isinstance(view.table, int) and view.table < 0:
        raise invalid(at, "a table is an index or a product's array")
    if not view.block.whole_rows:
        raise invalid(at, "a gathered block must be contiguous")
    plain = not view.axis and isinstance(view.table, int)
    if view.fallback and (not plain or not all(map(_is_fallback, view.fallback))):
        raise invalid(at, "a fallback must be rows, gathered by a table of the plan")
    return view


def _is_fallback(read: Read) -> bool:
    view = read.view
    return isinstance(view, Gather) and isinstance(view.table, int) and view.axis == 0 and not view.fallback


def _decode_table(value: Any, at: str) -> Table:
    data = decode(bytes, value, at)
    if len(data) % 4:
        raise invalid(at, "a table must be numbers of 4 bytes in base64")
    return Table(data)


def _decode_bytes(value: Any, at: str) -> bytes:
    try:
        return base64.b64decode(decode(str, value, at), validate=True)
    except ValueError:
        raise invalid(at, "it is not base64") from None


def _decode_file(value: Any, at: str) -> FileRead:
    file = FileRead(*decode(tuple[int, str, str], value, at))
    check_name(file.name, at)
    return file


def _row(record: Any) -> list[Any]:
    return list(astuple(record))


FORMS.update(
    {
        Plan: Form(_encode_plan, lambda value, _at: plan_from_json(value)),
        TensorSpec: Form(lambda spec: [spec.name, spec.dtype.name, list(spec.shape)], _decode_spec),
        Step: Form(_encode_step, _decode_step),
        Read: Form(_encode_read, _decode_read),
        Block: Form(_row, _decode_block),
        Gather: Form(_encode_gather, _decode_gather),
        Table: Form(lambda table: encode(table.data), _decode_table),
        bytes: Form(lambda data: base64.b64encode(data).decode(), _decode_bytes),
        Dropped: Form(_row, lambda value, at: Dropped(*decode(tuple[int, str, str], value, at))),
        FileRead: Form(_row, _decode_file),
    }
)
