"""ggml's types as encodings."""

from __future__ import annotations

import sys
from collections.abc import Callable

import gguf
import numpy as np
import pytest

from weightsmith._base.errors import FormatError, NonFinite, UnknownName, Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._files.arrays import view_of
from weightsmith._models.formats import Encoding, find_encoding
from weightsmith._models.formats.gguf.architectures.granite import GraniteHybrid
from weightsmith._models.formats.gguf.base.values import GgufConfig
from weightsmith._models.formats.gguf.cuts import CutWeight, find_cut
from weightsmith._models.formats.gguf.layout import TYPE_IDS
from weightsmith._models.formats.gguf.writing import TYPES, find
from weightsmith._models.sources.composed import StateDict
from weightsmith.testing import EncodingTests

BF16 = DTYPES["BF16"]


@pytest.mark.matrix("", "gguf-q8_0*", "gguf-f*", "gguf-b*")
@pytest.mark.parametrize(
    "name",
    [
        *(
            "gguf-f32+1",
            "gguf-f16",
            "gguf-bf16/8",
            "gguf-q8_0",
            "gguf-q5_1/8",
            "gguf-q4_k",
            "gguf-iq4_nl",
            "gguf-f16*2",
            "gguf-q8_0~0.5",
        ),
        *("gguf-256:q5_0[0-128]t,q4_k[128-256]", "gguf-32:f16[0-32,0+2]t,q8_0[0-32,1+2]t", "gguf-1:f32[0-1,0+2],bf16[0-1,1+2]"),
        "gguf-32:f16[0-32,0-16]t,q8_0[0-32,16-64]t",
        *("gguf-32+:q8_0[0-8]+[16-32],f16[8-16]", "gguf-32+:q8_0[0-8],q5_0[8-32]"),
    ],
)
class TestGguf(EncodingTests):
    @pytest.fixture
    def encoding(self, name: str) -> Encoding:
        return find_encoding(name)


def encoded(name: str, spec: TensorSpec, rows: np.ndarray, importances: np.ndarray | None = None, first: int = 0) -> np.ndarray:
    encoding = find(name)
    assert encoding is not None
    (out,) = encoding.outs(spec)
    data = np.zeros(len(rows) * spec.shape[-1] // out.dtype.block * out.dtype.itemsize, np.uint8)
    encoding.encode(spec, rows, first, [data], np.zeros(0, np.float32) if importances is None else importances)
    return data


def numbers(rows: int, cols: int) -> np.ndarray:
    return (np.random.default_rng(0).standard_t(4, (rows, cols)) * 0.05).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_the_bytes_are_those_of_another_writer(kind: str) -> None:
    rows = numbers(7, 96)
    theirs = gguf.quants.quantize(rows, gguf.GGMLQuantizationType(TYPE_IDS[kind]))
    assert encoded(f"gguf-{kind.lower()}", TensorSpec("w", BF16, rows.shape), rows).tobytes() == theirs.tobytes()


BOUNDS = {
    "Q8_0": 1 / 254 + 2**-11,
    "Q5_0": 1 / 16 + 2**-11,
    "Q4_0": 1 / 8 + 2**-11,
    "Q6_K": 0.06,
    "Q5_K": 0.12,
    "Q4_K": 0.2,
    "IQ4_NL": 0.2,
}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "share"), BOUNDS.items())
def test_no_element_is_further_off_than_a_share_of_its_blocks_largest(kind: str, share: float) -> None:
    rows = numbers(32, 256)
    data = encoded(f"gguf-{kind.lower()}", TensorSpec("w", BF16, rows.shape), rows).reshape(32, -1)
    decoded = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(TYPE_IDS[kind]))
    largest = np.abs(rows.reshape(32, -1, TYPES[kind].block)).max(-1, keepdims=True)
    error = np.abs(decoded - rows).reshape(32, -1, TYPES[kind].block) / largest
    assert error.max() < share
    assert error.max() > share / 8  # the bound is not so wide that it says nothing


def test_heads_are_reordered_as_llama_cpp_wants() -> None:
    rows = np.arange(16, dtype=np.float32)[:, None] * np.ones((1, 2), np.float32)
    order = encoded("gguf-f32/8", TensorSpec("q", BF16, (16, 2)), rows).view(np.float32).reshape(16, 2)[:, 0]
    assert order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_rows_are_multiplied_one_after_the_other() -> None:
    rows = numbers(8, 32)
    bands = np.float32([0.3] * 2 + [1.0] * 5 + [7.0])[:, None]
    expected = rows * np.float32(0.7) * bands
    spec = TensorSpec("w", BF16, rows.shape)
    for first in (0, 3):
        data = encoded("gguf-f32~0.7~2:0.3,5:1.0,1:7.0", spec, rows[first:], first=first).view(np.float32).reshape(-1, 32)
        assert np.array_equal(data, expected[first:])
    whole = encoded("gguf-q8_0/4~0.7", spec, rows)
    assert whole.tobytes() == encoded("gguf-q8_0/4", spec, rows * np.float32(0.7)).tobytes()
    encoding = find("gguf-f32~2:0.3,5:1.0")
    assert encoding is not None
    assert encoding.refusal(spec) == "its 8 rows are not 2 + 5"
    assert "only rows of matrices are multiplied" in encoding.refusal(TensorSpec("w", BF16, (7,)))


def test_a_convolution_that_keeps_its_middle_dimension() -> None:
    encoding, values = find_encoding("gguf-f32-deep"), numbers(6, 4)
    (out,) = encoding.outs(TensorSpec("q_conv1d.weight", BF16, (6, 1, 4)))
    assert out.shape == (1, 6, 1, 4)
    assert encoded("gguf-f32-deep", TensorSpec("w", BF16, (6, 1, 4)), values).tobytes() == values.tobytes()
    assert "is not one of a depthwise convolution" in encoding.refusal(TensorSpec("w", BF16, (6, 2, 4)))


@pytest.mark.long
def test_each_expert_has_importances_of_its_own() -> None:
    rows, weights = numbers(12, 256), np.random.default_rng(1).uniform(0.1, 3, (3, 256)).astype(np.float32)
    spec = TensorSpec("experts", BF16, (3, 4, 256))
    whole = encoded("gguf-q4_k", spec, rows, weights.reshape(-1)).reshape(12, -1)
    for e in range(3):
        alone = encoded("gguf-q4_k", TensorSpec("w", BF16, (4, 256)), rows[4 * e : 4 * e + 4], weights[e])
        assert whole[4 * e : 4 * e + 4].tobytes() == alone.tobytes()
    assert encoded("gguf-q4_k", spec, rows[3:9], weights.reshape(-1), 3).tobytes() == whole[3:9].tobytes()
    assert whole.tobytes() != encoded("gguf-q4_k", spec, rows).tobytes()


def test_pieces_are_tensors_of_their_own() -> None:
    values = np.arange(6 * 3 * 2 * 2 * 2, dtype=np.float32).reshape(6, 3, 2, 2, 2)
    for name, pieces in (("gguf-f32*3", np.split(values, 3)), ("gguf-f32*2@2", [values[:, :, i] for i in range(2)])):
        encoding, spec = find_encoding(name), TensorSpec("w", BF16, values.shape if "@" in name else (6, 24))
        outs = encoding.outs(spec)
        data = [np.zeros(out.nbytes, np.uint8) for out in outs]
        encoding.encode(spec, values.reshape(spec.shape), 0, data, np.zeros(0, np.float32))
        for out, written, piece in zip(outs, data, pieces, strict=True):
            assert out.size == piece.size
            assert np.array_equal(written.view(np.float32), piece.ravel())
    assert [out.shape for out in outs] == [(6, 3, 2, 2)] * 2


def test_names() -> None:
    for name in (
        "gguf-q4_k",
        "gguf-f32+1",
        "gguf-iq4_xs/128",
        "gguf-f16*3",
        "gguf-bf16*2@2",
        "gguf-f32~0.1~2:1e-05,3:2.0",
        "gguf-i32",
    ):
        encoding = find(name)
        assert encoding is not None
        assert encoding.name == name
    for name in (
        "gguf-q9_k",
        "gguf-q4_k/0",
        "gguf-q4_k/1+2",
        "gguf-i64",
        "gguf-i32+1",
        "gguf-i32/2",
        "gguf-f64",
        "gguf-f16*1",
        "gguf-f16@2",
        "gguf-f32~",
        "gguf-f32~0",
        "gguf-f32~1.0,2.0",
    ):
        with pytest.raises(UnknownName):
            find_encoding(name)


@pytest.mark.parametrize(
    ("name", "spec", "why"),
    [
        ("gguf-q4_k", TensorSpec("w", BF16, (4, 320)), "its rows of 320 are not a multiple of 256"),
        ("gguf-q4_k", TensorSpec("w", BF16, ()), "its rows of 1 are not a multiple of 256"),
        ("gguf-q8_0/64", TensorSpec("w", BF16, (96, 32)), "its 96 rows are not whole heads of 64"),
        ("gguf-f32", TensorSpec("w", DTYPES["I64"], (4,)), "it is I64"),
        ("gguf-i32", TensorSpec("w", BF16, (4, 2)), "it is BF16, not whole numbers"),
        ("gguf-f32*3", TensorSpec("w", BF16, (4, 2)), "its shape [4, 2] cannot be cut into 3 pieces along dimension 0"),
        (
            "gguf-f32*2@2",
            TensorSpec("w", BF16, (4, 2, 3, 1)),
            "its shape [4, 2, 3, 1] cannot be cut into 2 pieces along dimension 2",
        ),
        ("gguf-q8_0*2", TensorSpec("w", BF16, (4, 32)), "pieces are plain numbers"),
        ("gguf-f32", TensorSpec("w", BF16, (2, 1, 2, 1, 2)), "its shape is [2, 1, 2, 1, 2]"),
    ],
)
def test_what_is_refused(name: str, spec: TensorSpec, why: str) -> None:
    with pytest.raises(Unsupported) as caught:
        find_encoding(name).outs(spec)
    assert why in str(caught.value)


@pytest.mark.long
def test_without_libgguf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libgguf", None)
    with pytest.raises(Unsupported, match="is not installed"):
        encoded("gguf-iq3_s", TensorSpec("w", BF16, (2, 256)), numbers(2, 256))
    assert encoded("gguf-q4_k", TensorSpec("w", BF16, (2, 256)), numbers(2, 256)).any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["q8_0", "q4_k", "iq4_nl"])
def test_a_number_beyond_the_scales_is_an_error(name: str) -> None:
    rows = np.ones((2, 256), np.float32)
    rows[1, 7] = 1e9
    encoding, spec = find_encoding(f"gguf-{name}"), TensorSpec("w", DTYPES["F32"], (2, 256))
    out = np.empty(encoding.outs(spec)[0].nbytes, np.uint8)
    with pytest.raises(NonFinite, match=r"1e\+09 is not a number that blocks of"):
        encoding.encode(spec, rows, 0, [out], np.empty(0, np.float32))
    rows[1, 7] = 1e5  # beyond float16, but the scale is not
    encoding.encode(spec, rows, 0, [out], np.empty(0, np.float32))


def test_a_vector_becomes_rows() -> None:
    """Mamba's vectors are matrices in GGUF files."""
    vector = np.log(np.arange(1, 7, dtype=np.float32))
    spec = TensorSpec("A_log", BF16, (6,))
    numbers = np.arange(1, 7)
    for name, shape, expected in (
        ("gguf-f32=2", (3, 2), vector),
        ("gguf-f32-exp=1", (6, 1), -numbers),
        ("gguf-f32+exp=1", (6, 1), numbers),
    ):
        encoding = find(name)
        assert encoding is not None
        assert (encoding.name, [out.shape for out in encoding.outs(spec)]) == (name, [shape])
        assert encoded(name, spec, vector[None]).view(np.float32) == pytest.approx(expected, rel=1e-6)
    for name, other in (("gguf-f32=4", spec), ("gguf-f32=2", TensorSpec("w", BF16, (2, 6))), ("gguf-f32*2=3", spec)):
        encoding = find(name)
        assert encoding is not None
        with pytest.raises(Unsupported, match="is not one of a vector that becomes plain rows of"):
            encoding.outs(other)


def test_groups_that_do_not_share_the_heads_evenly() -> None:
    with pytest.raises(FormatError, match="mamba_n_groups is 3, and 64 is not a multiple of it"):
        GraniteHybrid().columns_of(
            "blk.0.ssm_norm.weight", GgufConfig({"mamba_expand": 2, "hidden_size": 32, "mamba_n_groups": 3})
        )


# ---- tensors in parts


def _kv_b(x: np.ndarray) -> list[np.ndarray]:
    heads = x.reshape(3, 10, 7)
    return [np.stack([head[:6].T for head in heads]), np.stack([head[6:] for head in heads])]


def _qkvz(x: np.ndarray) -> list[np.ndarray]:
    heads = x.reshape(3, 10, 7)
    return [np.concatenate([*(head[:2] for head in heads), *(head[2:7] for head in heads)]), np.concatenate(heads[:, 7:])]


PARTS = {
    "gguf-10:f32[0-6]t,f32[6-10]": ((30, 7), _kv_b),
    "gguf-10+:f32[0-2]+[2-7],f32[7-10]": ((30, 7), _qkvz),
    "gguf-6:f32[0-6,0+2]t,f32[0-6,1+2]t": ((3, 6, 8), lambda x: [x[:, :, k::2].swapaxes(1, 2) for k in (0, 1)]),
    "gguf-6:f32[0-6,0-4]t,f32[0-6,4-8]t": ((3, 6, 8), lambda x: [x[:, :, :4].swapaxes(1, 2), x[:, :, 4:].swapaxes(1, 2)]),
    "gguf-6:f32[0-6]t": ((3, 6, 8), lambda x: [x.swapaxes(1, 2)]),
    "gguf-6:f32[0-3],f32[3-6]": ((3, 6, 8), lambda x: [x[:, :3], x[:, 3:]]),
    "gguf-1:f32[0-1,0+2],f32[0-1,1+2]": ((3, 8), lambda x: [x[:, ::2], x[:, 1::2]]),
    "gguf-6:f32[0-2],f32[2-6]": ((6, 8), lambda x: [x[:2], x[2:]]),
}


@pytest.mark.parametrize(("name", "case"), PARTS.items())
def test_parts_are_what_their_name_says_and_come_back(
    name: str, case: tuple[tuple[int, ...], Callable[[np.ndarray], list[np.ndarray]]]
) -> None:
    shape, cut = case
    encoding = find_cut(name)
    assert encoding is not None
    whole = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    spec = TensorSpec("w", DTYPES["F32"], shape)
    outs, expected = encoding.outs(spec), cut(whole)
    data = [np.zeros(out.nbytes, np.uint8) for out in outs]
    encoding.encode(spec, whole.reshape(-1, shape[-1]), 0, data, np.zeros(0, np.float32))
    assert [out.shape for out in outs] == [array.shape for array in expected]
    for written, array in zip(data, expected, strict=True):
        assert np.array_equal(written.view(np.float32).reshape(array.shape), array)
    stored = StateDict({f"p{i}": view_of(f"p{i}", np.ascontiguousarray(array)) for i, array in enumerate(expected)}, "here")
    weight = CutWeight(
        spec, tuple(stored.specs), DTYPES["F32"], encoding.height, tuple(pieces for _, pieces in encoding.parts), encoding.flat
    )
    for first, count in ((0, whole.size), (5, whole.size // 2), (whole.size - 3, 3)):
        values = np.empty(count, np.float32)
        weight.decode(stored, first, values)
        assert np.array_equal(values, whole.reshape(-1)[first : first + count])


def test_each_part_has_importances_of_its_own() -> None:
    rows, rng = numbers(8, 256), np.random.default_rng(1)
    weights = [rng.uniform(0.1, 3, (4, 256)).astype(np.float32), np.zeros((4, 256), np.float32)]
    spec = TensorSpec("experts", BF16, (4, 2, 256))
    encoding = find_cut("gguf-2:q4_k[0-1],q4_k[1-2]")
    assert encoding is not None
    assert encoding.importance_counts(spec) == (2 * 4 * 256,)
    outs = [np.zeros(out.nbytes, np.uint8) for out in encoding.outs(spec)]
    encoding.encode(spec, rows, 0, outs, np.concatenate(weights).reshape(-1))
    later = [np.zeros(out.size // 2, np.uint8) for out in outs]
    encoding.encode(spec, rows[4:], 4, later, np.concatenate(weights).reshape(-1))
    one = TensorSpec("w", BF16, (1, 256))
    for i in range(4):
        first = encoded("gguf-q4_k", one, rows[2 * i : 2 * i + 1], weights[0][i])
        second = encoded("gguf-q4_k", one, rows[2 * i + 1 : 2 * i + 2])
        size = first.size
        assert (outs[0][i * size : (i + 1) * size] == first).all()
        assert (outs[1][i * size : (i + 1) * size] == second).all()
    assert [part.tobytes() for part in later] == [out[out.size // 2 :].tobytes() for out in outs]


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("gguf-8:f16[0-9]", (8, 4), "it has no rows or columns [0-9]"),
        ("gguf-8:f16[0-8,5+6]", (8, 4), "it has no rows or columns [0-8,5+6]"),
        ("gguf-8:f16[0-8,2-6]", (8, 4), "it has no rows or columns [0-8,2-6]"),
        ("gguf-8:f16[0-8]", (12, 4), "not one of whole bands of 8 rows"),
        ("gguf-8:f16[0-8]", (2, 4, 4), "not one of whole bands of 8 rows"),
        ("gguf-8:q8_0[0-8]t", (8, 64), "the rows of its part [0-8]t are not a multiple of 32"),
        ("gguf-8:f16[0-8]", (8,), "its shape is [8]"),
    ],
)
def test_what_cannot_be_cut(name: str, shape: tuple[int, ...], words: str) -> None:
    encoding = find_cut(name)
    assert encoding is not None
    assert words in encoding.refusal(TensorSpec("w", BF16, shape))


@pytest.mark.parametrize(
    "name", ["gguf-8:", "gguf-08:f16[0-8]", "gguf-8:f16[0-4]+[4-8]", "gguf-8+:f16[0-8]t", "gguf-8:f16[4-4]"]
)
def test_names_of_no_cut(name: str) -> None:
    assert find_cut(name) is None
