"""Where bytes go: shards, headers, offsets, index."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tests.work import steps
from weightsmith._base.errors import StoreError
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.containers import Layout, Naming, make_layout


def spec(name: str, nbytes: int, dtype: str = "U8") -> TensorSpec:
    return TensorSpec(name, DTYPES[dtype], (nbytes // DTYPES[dtype].itemsize,))


def header(layout: Layout, shard: int) -> dict[str, object]:
    raw = layout.shards[shard].header
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def test_one_shard_has_the_plain_name_and_no_index() -> None:
    layout = make_layout([spec("a", 10), spec("b", 20)], 30)
    assert [s.name for s in layout.shards] == ["model.safetensors"]
    assert not layout.indexes


def test_shards_are_filled_in_model_order_up_to_the_bound() -> None:
    layout = make_layout([spec("a", 10), spec("b", 20), spec("c", 1), spec("d", 30)], 30)
    assert [[t.name for t in s.tensors] for s in layout.shards] == [["a", "b"], ["c"], ["d"]]
    assert layout.shards[2].name == "model-00003-of-00003.safetensors"


def test_a_tensor_larger_than_the_bound_has_a_shard_of_its_own() -> None:
    layout = make_layout([spec("a", 10), spec("big", 1000), spec("c", 10)], 30)
    assert [[t.name for t in s.tensors] for s in layout.shards] == [["a"], ["big"], ["c"]]


def test_wider_dtypes_come_first_and_model_order_holds_within_a_width() -> None:
    specs = [spec("b2", 2, "BF16"), spec("u1", 1), spec("h2", 2, "F16"), spec("d8", 8, "F64"), spec("f4", 4, "F32")]
    layout = make_layout(specs, 100)
    assert [t.name for t in layout.shards[0].tensors] == ["d8", "f4", "b2", "h2", "u1"]
    assert list(layout.places) == [s.name for s in specs]  # model order


def test_data_starts_on_a_4096_byte_boundary_and_has_no_holes() -> None:
    layout = make_layout([spec(f"tensor{i}", i, "U8") for i in range(300)], 10_000)
    for number, shard in enumerate(layout.shards):
        assert len(shard.header) % 4096 == 0
        assert int.from_bytes(shard.header[:8], "little") == len(shard.header) - 8
        offset = len(shard.header)
        for tensor in shard.tensors:
            assert layout.places[tensor.name] == (number, offset, tensor.nbytes)
            offset += tensor.nbytes
        assert shard.nbytes == offset


def test_the_index_is_written_as_transformers_writes_it() -> None:
    layout = make_layout([spec("z\u00e9", 20), spec("a", 20)], 20)
    expected = {
        "metadata": {"total_size": 40},
        "weight_map": {"a": "model-00002-of-00002.safetensors", "z\u00e9": "model-00001-of-00002.safetensors"},
    }
    text = json.dumps(expected, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert layout.indexes["model.safetensors.index.json"].decode() == text
    assert layout.total_bytes == sum(s.nbytes for s in layout.shards) + sum(map(len, layout.indexes.values()))


def test_no_tensors_make_one_valid_empty_file() -> None:
    layout = make_layout([], 10)
    (shard,) = layout.shards
    assert safetensors.numpy.load(shard.header) == {}
    assert not layout.indexes


def test_metadata_is_format_pt_unless_given() -> None:
    assert header(make_layout([], 1), 0)["__metadata__"] == {"format": "pt"}
    assert header(make_layout([], 1, {"k": 'v"\n'}), 0)["__metadata__"] == {"k": 'v"\n'}


@pytest.mark.parametrize(
    ("specs", "bound", "metadata", "words"),
    [
        ([spec("a", 1), spec("a", 1)], 9, None, ["a:", "two tensors"]),
        ([spec("__metadata__", 1)], 9, None, ["__metadata__", "reserved"]),
        ([spec("bad\ud800", 1)], 9, None, ["surrogate"]),
        ([spec("a", 1)], 0, None, ["0 bytes", "max_shard_bytes"]),
        ([spec("a", 1)], -5, None, ["-5 bytes"]),
        ([spec("a", 1)], 9, {"n": 3}, ["'n' to 3", "json.dumps"]),
    ],
)
def test_what_cannot_be_stored_is_refused(
    specs: list[TensorSpec], bound: int, metadata: dict[str, str] | None, words: list[str]
) -> None:
    with pytest.raises(StoreError) as caught:
        make_layout(specs, bound, metadata)
    for word in [*words, "Nothing was written."]:
        assert word in str(caught.value)


def test_a_header_that_readers_would_refuse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._files.containers.MAX_HEADER_BYTES", 5000)
    with pytest.raises(StoreError, match="readers accept 5,000"):
        make_layout([spec(f"tensor{i}", 1) for i in range(100)], 1000)


@pytest.mark.long
def test_layout_of_a_hundred_thousand_tensors_is_linear_work() -> None:
    specs = [TensorSpec(f"model.layers.{i}.mlp.weight", DTYPES["BF16"], (4096, 1600)) for i in range(100_000)]
    assert len(make_layout(specs, 5_000_000_000).places) == 100_000
    few = steps(lambda: make_layout(specs[:2_000], 5_000_000_000))
    assert steps(lambda: make_layout(specs[:20_000], 5_000_000_000)) < 11 * few


names = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), unique=True, max_size=8)


@pytest.mark.slow
@given(names.filter(lambda ns: "__metadata__" not in ns), st.integers(1, 200), st.data())
def test_any_layout_is_read_by_the_safetensors_library(names: list[str], bound: int, data: st.DataObject) -> None:
    dtypes = st.sampled_from([DTYPES[n] for n in ("F64", "F32", "F16", "I8", "BOOL", "U32")])
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    specs = [TensorSpec(n, data.draw(dtypes), data.draw(shapes)) for n in names]
    layout = make_layout(specs, bound)
    tensors: dict[str, np.ndarray] = {}
    for shard in layout.shards:
        fill = bytes(i % 2 for i in range(shard.nbytes - len(shard.header)))
        tensors |= safetensors.numpy.load(shard.header + fill)
    assert {n: (a.dtype, a.shape) for n, a in tensors.items()} == {s.name: (s.dtype.numpy, s.shape) for s in specs}


def test_a_subfolder_has_one_file_with_the_names_of_its_own() -> None:
    specs = [spec("1_Dense/w", 8, "F32"), spec("a", 10), spec("b", 20), spec("1_Dense/deep/w", 4, "F32"), spec("1_Denser", 3)]
    layout = make_layout(specs, 25, naming=Naming(folders=("1_Dense",)))
    assert [s.name for s in layout.shards] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "1_Dense/model.safetensors",
    ]
    assert list(header(layout, 2)) == ["__metadata__", "w", "deep/w"]
    assert list(layout.places) == [s.name for s in specs]
    assert json.loads(layout.indexes["model.safetensors.index.json"])["weight_map"].keys() == {"a", "b", "1_Denser"}
    assert [t.name for t in layout.shards[2].tensors] == ["1_Dense/w", "1_Dense/deep/w"]


def test_the_names_of_diffusers_and_metadata() -> None:
    naming = Naming("diffusion_pytorch_model", {"modelspec.title": "Ink"})
    layout = make_layout([spec("a", 10), spec("b", 20)], 25, naming=naming)
    assert layout.shards[0].name == "diffusion_pytorch_model-00001-of-00002.safetensors"
    assert [*layout.indexes] == ["diffusion_pytorch_model.safetensors.index.json"]
    assert header(layout, 1)["__metadata__"] == {"format": "pt", "modelspec.title": "Ink"}
