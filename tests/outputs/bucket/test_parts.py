"""Where weight files are cut, and addresses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsmith._base.errors import ParameterError, StoreError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._execution.output import sibling
from weightsmith._files.containers.safetensors import make_layout
from weightsmith._models.formats.gguf.layout import make_layout as make_gguf_layout
from weightsmith._outputs.bucket import parts
from weightsmith._outputs.bucket.parts import cut
from weightsmith._outputs.local.target import is_address
from weightsmith._outputs.places import place_of

SIZES = st.lists(st.integers(0, 5000), min_size=0, max_size=30)


@pytest.mark.slow
@given(
    sizes=SIZES,
    part_bytes=st.integers(50, 4000),
    max_shard_bytes=st.integers(1, 20_000),
    gguf=st.booleans(),
    equal=st.booleans(),
)
def test_parts_cover_each_file_once_and_no_part_has_bytes_of_two_groups(
    sizes: list[int], part_bytes: int, max_shard_bytes: int, gguf: bool, equal: bool
) -> None:
    gguf = gguf and bool(sizes)
    specs = [TensorSpec(f"t{i}", DTYPES["F32" if gguf else "U8"], (n + gguf,)) for i, n in enumerate(sizes)]
    layout = make_gguf_layout(specs, 1 << 40, b"GGUF header") if gguf else make_layout(specs, max_shard_bytes)
    groups = cut(layout, part_bytes, equal=equal)
    assert sorted(name for group in groups for name in group.tensors) == sorted(layout.places)
    for number, shard in enumerate(layout.shards):
        own = [group for group in groups if group.shard == number]
        found = [part for group in own for part in group.parts]
        assert [part.number for part in found] == list(range(1, len(found) + 1))
        assert len(found) <= parts.MAX_PARTS
        at = 0
        for part in found:
            assert part.start == at
            assert part.nbytes >= part_bytes or part is found[-1]
            assert part.nbytes <= 2 * part_bytes or len(found) == 1
            at += part.nbytes
        assert at == shard.nbytes
        assert not equal or len({part.nbytes for part in found[:-1]}) < 2
        assert not equal or all(part.nbytes <= found[0].nbytes for part in found)
        assert [group.header for group in own] == [True] + [False] * (len(own) - 1)
        for group in own:
            begin, end = group.parts[0].start, group.parts[-1].start + group.parts[-1].nbytes
            places = [layout.places[name] for name in group.tensors]
            assert all(begin <= p.offset and p.offset + p.nbytes <= end for p in places)
        filled = len(shard.header) + sum(layout.places[spec.name].nbytes for spec in shard.tensors)
        assert sum(part.filled for part in found) == filled


def test_a_large_file_has_no_more_parts_than_a_store_takes() -> None:
    layout = make_layout([TensorSpec("w", DTYPES["U8"], (50_000_000_000,)), TensorSpec("v", DTYPES["U8"], (9,))], 10**12)
    (first, *_), found = cut(layout), [part for group in cut(layout) for part in group.parts]
    assert 5000 < len(found) <= parts.MAX_PARTS
    assert first.parts[0].nbytes < 2 * (50_000_000_000 // 9_999 + 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://user:SECRET@b/x?key=SECRET", "there is no scheme of outputs 'http'"),
        ("ftp://b/x", "Write to a local folder, or to hf://, s3://"),
        ("s3://", "not the address of a folder"),
        ("s3:///x", "not the address of a folder"),
        ("s3://bkt", "it is a whole bucket"),
        ("s3://bkt/", "it is a whole bucket"),
        ("s3://bkt/a//b", "not the address of a folder"),
        ("s3://bkt/a/../b", "not the address of a folder"),
        ("s3://bkt/a\x1bb", "not the address of a folder"),
        ("s3://bkt/" + "a" * 2000, "longer than 700 bytes"),
        ("s3://user:SECRET@bkt/a", "an address holds no user, password"),
    ],
)
def test_what_is_no_address_is_refused_with_what_would_work(text: str, message: str) -> None:
    with pytest.raises((StoreError, ParameterError)) as found:
        place_of(text)
    assert message in str(found.value)
    assert "SECRET" not in str(found.value)


def test_addresses_and_folders_are_told_apart() -> None:
    assert is_address("s3://b/x")
    assert is_address("GS://b")
    assert not is_address("out")
    assert sibling("out", ".measurement").name == "out.measurement"
    own, upper, other = (sibling(out, ".measurement").name for out in ("s3://b/x/out", "S3://b/x/out/", "s3://b/y/out"))
    assert own == upper != other
