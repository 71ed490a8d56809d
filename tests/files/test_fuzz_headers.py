"""Whatever the bytes: read_header returns a header that fits its file, or raises one of our errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsmith._base.errors import WeightsmithError
from weightsmith._base.tensors import DTYPES
from weightsmith._files.safetensors import read_header

fuzz = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

ODD = st.sampled_from(
    [None, True, False, -1, 0, 1, 2**31, 2**62, 2**63, 2**64, 10**40, 1.0, 1e300, "", "F32", "w", [], {}, [1], [0, 4]]
)


def file_of(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@st.composite
def good_headers(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A header of up to five small tensors, in any order of entries, and its data."""
    names = draw(st.lists(st.text(max_size=6), max_size=5, unique=True).filter(lambda x: "__metadata__" not in x))
    entries, end = {}, 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = DTYPES[dtype].itemsize
        for dim in shape:
            nbytes *= dim
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    header: dict[str, Any] = {name: entries[name] for name in draw(st.permutations(names))}
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
    return header, bytes(end)


def spoil(draw: st.DrawFn, node: Any) -> Any:
    """The JSON value with one place in it changed."""
    if isinstance(node, (dict, list)) and node and draw(st.integers(0, 3)):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = draw(st.sampled_from(keys))
        copy = node.copy()
        if draw(st.integers(0, 7)) == 0:
            del copy[key]
        else:
            copy[key] = spoil(draw, node[key])
        return copy
    if isinstance(node, int) and draw(st.booleans()):
        return node + draw(st.integers(-9, 9))
    return draw(ODD)


@st.composite
def spoiled_headers(draw: st.DrawFn) -> tuple[Any, bytes]:
    header, data = draw(good_headers())
    spoiled: Any = header
    for _ in range(draw(st.integers(0, 2))):
        spoiled = spoil(draw, spoiled)
    return spoiled, data[: len(data) - draw(st.integers(0, 2))] + bytes(draw(st.integers(0, 2)))


def check(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        header = read_header(path)
    except WeightsmithError as error:
        assert str(error).startswith(f"{path}: ")  # noqa: PT017 - one of two good outcomes
        return
    end = 8 + int.from_bytes(data[:8], "little")
    for tensor in header.tensors:
        assert tensor.offset == end
        end += tensor.spec.nbytes
    assert end == header.state.nbytes == len(data)
    theirs = safetensors.deserialize(data)  # what is good here is good for the reference reader, and means the same
    assert {n: (t["dtype"], tuple(t["shape"])) for n, t in theirs} == {
        t.spec.name: (t.spec.dtype.name, t.spec.shape) for t in header.tensors
    }


@pytest.mark.slow
@fuzz
@given(data=st.binary(max_size=200))
def test_any_bytes(data: bytes, tmp_path: Path) -> None:
    check(tmp_path / "a.safetensors", data)


@pytest.mark.slow
@fuzz
@given(text=st.binary(max_size=100), data=st.binary(max_size=9))
def test_any_bytes_as_header(text: bytes, data: bytes, tmp_path: Path) -> None:
    check(tmp_path / "a.safetensors", len(text).to_bytes(8, "little") + text + data)


@pytest.mark.long
@fuzz
@given(good=good_headers(), place=st.floats(0, 1, exclude_max=True), new=st.binary(max_size=3), cut=st.integers(0, 3))
def test_a_good_file_with_a_few_bytes_replaced(
    good: tuple[dict[str, Any], bytes], place: float, new: bytes, cut: int, tmp_path: Path
) -> None:
    data = file_of(*good)
    at = int(place * len(data))
    check(tmp_path / "a.safetensors", data[:at] + new + data[at + cut :])


@pytest.mark.long
@fuzz
@given(spoiled=spoiled_headers())
def test_a_good_header_with_a_few_values_replaced(spoiled: tuple[Any, bytes], tmp_path: Path) -> None:
    check(tmp_path / "a.safetensors", file_of(*spoiled))


@pytest.mark.long
@fuzz
@given(good=good_headers())
def test_a_good_file_is_accepted(good: tuple[dict[str, Any], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    check(path, file_of(*good))
    assert {t.spec.name for t in read_header(path).tensors} == good[0].keys() - {"__metadata__"}


@pytest.mark.long
@fuzz
@given(tree=st.recursive(ODD, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3)))
def test_any_json(tree: Any, tmp_path: Path) -> None:
    check(tmp_path / "a.safetensors", file_of(tree, b""))


def test_every_prefix_of_a_good_file_is_refused(tmp_path: Path) -> None:
    good = file_of({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
    path = tmp_path / "a.safetensors"
    for n in range(len(good)):
        path.write_bytes(good[:n])
        with pytest.raises(WeightsmithError):
            read_header(path)
