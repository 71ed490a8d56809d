"""The codec of records: strict in types and keys, and its own inverse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from weightsmith._base.errors import FormatError
from weightsmith._plans import Block, Product, ProductSettings, Read
from weightsmith._plans.codec import OMITTED, decode, encode, has_type


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"]
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outer(ProductSettings):
    name: str
    share: float
    inner: tuple[Inner, ...]
    pair: tuple[int, str]
    table: Mapping[str, int | None]
    anything: Any = None
    more: tuple[int, ...] = field(default=(), metadata=OMITTED)
    level: int = field(default=-1, metadata={**OMITTED, "key": "depth"})

    def problem(self, product: Product, shapes: Mapping[str, tuple[int, ...]]) -> str:
        return ""


WHOLE = Outer("x", 0.5, (Inner("a"), Inner("b", (1, 2))), (1, "y"), {"p": 1, "q": None}, [{"z": 1}], (3,), 0)
PLAIN = Outer("x", 1, (), (1, "y"), {})


@pytest.mark.parametrize("record", [WHOLE, PLAIN])
def test_a_record_is_what_its_json_says(record: Outer) -> None:
    data = json.loads(json.dumps(encode(record)))
    assert decode(Outer, data, "here") == record
    assert encode(decode(Outer, data, "here")) == data
    assert has_type(data, Outer)
    assert Outer.of(Product("p", "op", (), record.to_json())) == record


def test_fields_are_left_out_while_they_have_their_default() -> None:
    assert {"more", "level", "depth"}.isdisjoint(encode(PLAIN))
    assert encode(WHOLE)["depth"] == 0  # not empty: a number
    assert encode(WHOLE)["more"] == [3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 1}, "here.name: invalid plan: expected str, not int"),
        ({"share": True}, "here.share: .* expected a finite number"),
        ({"share": 10**400}, "here.share: .* expected a finite number, not 10{60,80}[.]{3}0+"),
        ({"share": float("nan")}, "here.share: .* expected a finite number"),
        ({"pair": [1]}, "here.pair: .* expected 2 values, not 1"),
        ({"pair": [True, "y"]}, "expected int, not bool"),
        ({"inner": [{"kind": "c", "sizes": []}]}, r"here.inner\[0\].kind: .* 'c' is not one of a, b"),
        ({"inner": [{"kind": "a"}]}, r"here.inner\[0\]: .* 'sizes' is missing"),
        ({"inner": [{"kind": "a", "sizes": [], "x": 1}]}, "unknown key 'x'"),
        ({"inner": {}}, "expected list, not dict"),
        ({"table": {"p": "1"}}, "here.table.p: .* expected int, not str"),
        ({"table": []}, "expected dict, not list"),
        ({"level": 3}, "unknown key 'level'"),
        ({"depth": None}, "expected int, not NoneType"),
    ],
)
def test_other_values_are_errors_with_their_place(change: dict[str, Any], words: str) -> None:
    data = encode(WHOLE) | change
    with pytest.raises(FormatError, match=words):
        decode(Outer, data, "here")
    assert not has_type(data, Outer)


@pytest.mark.parametrize("value", [[0], [], {"0": 0, "1": "w"}, [True, "w"], [0, 1]])
def test_what_is_no_read_is_one_error(value: Any) -> None:
    with pytest.raises(FormatError, match=r"a read is \[model, tensor\]"):
        decode(Read, value, "reads")


@pytest.mark.parametrize("value", [[0, 1, 1], [-1, 1, 1, 1], [0, 1, 1, (1 << 62) + 1], [0, 1, True, 1], [0, 1, 1.0, 1], "0111"])
def test_what_is_no_block_is_one_error(value: Any) -> None:
    with pytest.raises(FormatError, match=r"a block is \[offset, rows, cols, stride\]"):
        decode(Block, value, "view")
