"""EXL2's packer, decoder and quantiser: golden vectors, and a slow decoder written from the format's description."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsmith._base.errors import FormatError, NonFinite, ParameterError, Unsupported
from weightsmith._base.tensors import DTYPES, TensorSpec
from weightsmith._kernels.codes import pack_down
from weightsmith._models.formats import find_encoding, hessians
from weightsmith._models.formats.exl2.layout import BITS, padded, stored_specs, why_illegal
from weightsmith._models.formats.exl2.writing import (
    GRID,
    Exl2Matrix,
    dequantise_matrix,
    find_scales,
    quantise_matrix,
    scale_values,
)
from weightsmith._models.formats.hessians import COPIED, INVERTED, CodesOf, Group, Groups, prepare
from weightsmith.abc.stored import FactoredHessian, Unread

WORDS = {
    2: "1b1b1b1b 1b1b1b1b",
    3: "53977053 70539770 97705397",
    4: "4d6f81a3 c5e7092b 4d6f81a3 c5e7092b",
    5: "4dfc4543 78245ba3 0753617d 4b276cf4 e55c7066",
    6: "9f611283 90bbd2d9 b2579740 8f201eb3 9cab91d5 71538703",
    8: "18110a03 342d261f 5049423b 6c655e57 88817a73 a49d968f c0b9b2ab dcd5cec7",
}
"""Packed codes (7 k + 3) mod 2^bits of 32 rows."""

DIGESTS = {
    "q_weight": "9f33b42a62b31c59f5a1100c6fefb354fb96b50f6c47cd6f456df7dcfde2e1dd",
    "q_scale": "428189d867a80d2ad66bdecb84b343dca5c1fc1aa596d927387dafcb3af5e4df",
    "q_scale_max": "41cee8a53f9ca89070583e3097a4ca7156eca3aef96d8796f641aaec853546b2",
    "q_groups": "cdc55e1785e18cca6740d32f2ee91f80ce8a760dd6b68d85b3efff9af94518b6",
    "q_invperm": "50b439d9ee43cf52799cdf43eeb015268f627a06f8e3100cb579368a858342d5",
}
GOLDEN_WEIGHT = "86b98d6da329e0b9e9ec6f0641d81c590d5ea5f18008717dcf05a9d948492323"

FOUR = (Group(4, 64),)


def golden() -> Exl2Matrix:
    """The mini-tensor of the format's golden vectors: K 128, N 32, groups of 8, 5, 3 and 2 bits."""
    k, c = np.arange(128)[:, None], np.arange(32)
    words = []
    for g, bits in enumerate((8, 5, 3, 2)):
        packed = np.empty((bits, 32), np.uint32)
        pack_down(((7 * k + 3 * c + 3) % (1 << bits)).astype(np.uint8)[32 * g : 32 * g + 32], bits, packed)
        words.append(packed)
    nibbles = ((5 * np.arange(4)[:, None] + c) % 16).astype(np.uint64).reshape(4, 4, 8)
    q_scale = (nibbles << np.arange(0, 32, 4, dtype=np.uint64)).sum(-1).astype(np.uint32)
    return Exl2Matrix(
        np.concatenate(words).view(np.int32),
        q_scale.view(np.int32),
        np.array([0.0123, 0.05, 0.2, 0.5], np.float16),
        np.array([8, 0, 5, 8, 3, 13, 2, 16], np.int16),
        ((37 * np.arange(128) + 11) % 128).astype(np.int32),
        32,
    )


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def hexes(words: np.ndarray) -> str:
    return " ".join(f"{int(word):08x}" for word in words.ravel().view(np.uint32))


def slowly(m: Exl2Matrix) -> np.ndarray:
    """float16 [N, K], with Python's integers for the bits and numpy's float16 for the arithmetic."""
    bits, starts = m.q_groups[::2].tolist(), [*m.q_groups[1::2].tolist(), len(m.q_weight)]
    sorted_rows = []
    for g, b in enumerate(bits):
        words = m.q_weight.view(np.uint32)[starts[g] : starts[g + 1]]
        step = m.q_scale_max[g] / np.float16(256)
        columns = []
        for c in range(words.shape[1]):
            stream = sum(int(word) << (32 * i) for i, word in enumerate(words[:, c]))
            n = int(m.q_scale.view(np.uint32)[g, c // 8]) >> (4 * (c % 8)) & 15
            scale = np.float16((n + 1) ** 2) * step
            codes = [(stream >> (b * j)) % (1 << b) - (1 << (b - 1)) for j in range(32 * len(words) // b)]
            columns.append([np.float16(code) * scale for code in codes])
        sorted_rows += np.array(columns, np.float16).T.tolist()
    return np.array(sorted_rows, np.float16)[m.q_invperm].T[: m.out_features]


def random_weight(n: int, k: int, seed: int = 0, scale: float = 0.05) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(n, k)) * scale).astype(np.float32)


def random_inputs(k: int, seed: int = 1) -> np.ndarray:
    """float32 [2048, k]: correlated features of different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(2048, k)) @ (rng.normal(size=(k, k)) * np.exp(rng.normal(size=k)))).astype(np.float32)


def quantised(weight: np.ndarray | Unread, hessian: np.ndarray | None, groups: Groups) -> Exl2Matrix:
    return quantise_matrix(weight, None if hessian is None else prepare(hessian), groups)


# ---- the format


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_packed_as_in_the_golden_vectors(bits: int) -> None:
    codes, words = ((7 * np.arange(32) + 3) % (1 << bits)).astype(np.uint8), np.empty((bits, 1), np.uint32)
    pack_down(codes[:, None], bits, words)
    assert hexes(words) == WORDS[bits]


def test_the_golden_tensor() -> None:
    m = golden()
    assert {name: sha256(getattr(m, name)) for name in DIGESTS} == DIGESTS
    assert hexes(m.q_weight[0, :4]) == "18110a03 1b140d06 1e171009 211a130c"
    assert hexes(m.q_scale[:, 0]) == "76543210 cba98765 10fedcba 6543210f"
    weight = dequantise_matrix(m)
    assert sha256(weight.T) == GOLDEN_WEIGHT
    assert [f"{x:04x}" for x in weight[:4, 5].view(np.uint16)] == ["3489", "b333", "3039", "b8e6"]
    np.testing.assert_array_equal(weight, slowly(m))


def test_scales_are_computed_in_float16_with_subnormals() -> None:
    scales = scale_values(np.array([0.0123, 0.000784], np.float16), np.array([15, 7, 0])).astype(np.float16).view(np.uint16)
    assert [[f"{x:04x}" for x in row] for row in scales] == [["224c", "1a4c", "0326"], ["1260", "0a60", "0033"]]


@st.composite
def groupings(draw: st.DrawFn) -> Groups:
    bits = sorted(draw(st.lists(st.sampled_from(BITS), min_size=1, max_size=3)), reverse=True)
    return tuple(Group(b, draw(st.sampled_from([32, 64, 128, 160]))) for b in bits)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(groupings(), st.integers(1, 40), st.integers(0, 1 << 30), st.sampled_from([1e-6, 1e-3, 0.05, 30.0]), st.booleans())
def test_what_is_stored_decodes_as_the_description_says(
    groups: Groups, n: int, seed: int, scale: float, with_hessian: bool
) -> None:
    k = sum(group.rows for group in groups)
    rng = np.random.default_rng(seed)
    weight = random_weight(n, k, seed, scale)
    weight[:, : k // 4] = 0
    x = rng.normal(size=(2 * k, k)).astype(np.float32)
    m = quantised(weight, x.T @ x if with_hessian else None, groups)
    for spec, array in zip(stored_specs("m", groups, k, n), m.arrays, strict=True):
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype.numpy)
    decoded = dequantise_matrix(m)
    assert decoded.dtype == np.float16
    assert decoded.shape == weight.shape
    np.testing.assert_array_equal(decoded, slowly(m))


# ---- the quantiser


@pytest.mark.parametrize("bits", BITS)
def test_plain_rounding_takes_the_nearest_value_that_the_scales_allow(bits: int) -> None:
    weight = random_weight(40, 96)
    m = quantised(weight, None, (Group(bits, 64), Group(bits, 32)))
    decoded, half = dequantise_matrix(m).astype(np.float64), weight.astype(np.float16).astype(np.float64)
    for g, features in enumerate((slice(0, 64), slice(64, 96))):
        nibbles = m.q_scale.view(np.uint32)[g, np.arange(40) // 8] >> (4 * (np.arange(40) % 8)).astype(np.uint32) & np.uint32(
            15
        )
        step = np.float16(np.float32(m.q_scale_max[g]) / 256)
        scales = (np.float32(step) * (nibbles + np.float32(1)) ** 2).astype(np.float16).astype(np.float64)
        values = scales[:, None, None] * np.arange(-(1 << (bits - 1)), 1 << (bits - 1))
        nearest = np.abs(values - half[:, features, None]).min(-1)
        np.testing.assert_allclose(np.abs(decoded[:, features] - half[:, features]), nearest, atol=2**-10 * np.abs(half).max())


def test_the_search_finds_the_scale_of_the_whole_grid() -> None:
    from weightsmith._kernels.exl2 import best_scale

    rows = random_weight(64, 200) * np.random.default_rng(3).choice([1, 6], (64, 200), p=[0.98, 0.02])
    rows = rows.astype(np.float16).astype(np.float32)
    which = np.random.default_rng(2).integers(6, 16, 200).astype(np.uint8)
    tops = (np.abs(rows).max() / 7.5 * GRID).astype(np.float16)
    table = scale_values(tops, np.arange(16))
    scales = table[:, which][:, None, :].astype(np.float64)
    errors = (np.abs(np.clip(np.rint(rows / scales), -8, 7) * scales - rows) ** 3.5).sum((1, 2))
    for guess in (0, 40, 96):
        assert best_scale(rows, which, table, 4, 100.0, guess) == errors.argmin()


@pytest.mark.parametrize(("bits", "least"), [(2, 1.3), (3, 1.35), (4, 1.35), (8, 1.35)])
def test_with_a_hessian_the_output_of_the_layer_changes_less(bits: int, least: float) -> None:
    weight, x = random_weight(64, 256), random_inputs(256)
    y, groups = x @ weight.T, (Group(bits, 128), Group(bits, 128))

    def error(hessian: np.ndarray | None) -> float:
        decoded = dequantise_matrix(quantised(weight, hessian, groups)).astype(np.float32)
        return float(np.linalg.norm(x @ decoded.T - y) / np.linalg.norm(y))

    assert error(None) > least * error(x.T @ x)


def test_the_factor_is_that_of_the_inverse() -> None:
    x = random_inputs(200)
    hessian = x.T @ x
    prepared = prepare(hessian)
    diagonal = hessian.diagonal()
    assert (np.diff(diagonal[prepared.order]) <= 0).all()
    damped = hessian[np.ix_(prepared.order, prepared.order)] + 0.12 * diagonal.mean() * np.eye(200)
    factor = prepared.factor.numpy().astype(np.float64)
    assert (np.tril(factor, -1) == 0).all()
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(200), atol=1e-4)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_factor_of_several_blocks_is_that_of_the_inverse_on_any_number_of_threads() -> None:
    features = 2 * INVERTED + 70
    x = np.random.default_rng(1).standard_normal((1500, features)).astype(np.float32)
    hessian = x.T @ x
    prepared = prepare(hessian)
    damped = hessian[np.ix_(prepared.order, prepared.order)] + 0.12 * hessian.diagonal().mean() * np.eye(features)
    factor = prepared.factor.numpy().astype(np.float64)
    assert (np.tril(factor, -1) == 0).all()
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(features), atol=1e-4)
    assert (prepare(hessian, threads=3).factor.numpy() == prepared.factor.numpy()).all()


def by_rows(weight: np.ndarray, hessian: np.ndarray, groups: Groups) -> np.ndarray:
    """The quantiser's loop in float64, one row at a time, with the same scales: float64 [N, K]."""
    prepared = prepare(hessian)
    u, w = prepared.factor.numpy().astype(np.float64), weight.astype(np.float16).astype(np.float64).T[prepared.order]
    out, first = np.empty_like(w), 0
    for bits, rows in groups:
        _, _, scales, _ = find_scales(w[first : first + rows].astype(np.float32), bits, 48)
        for k in range(first, first + rows):
            codes = np.clip(np.rint(w[k] / scales), -(1 << (bits - 1)), (1 << (bits - 1)) - 1)
            out[k] = (codes * scales).astype(np.float16)
            w[k + 1 :] -= np.outer(u[k, k + 1 :], (w[k] - out[k]) / u[k, k])
        first += rows
    result = np.empty_like(out)
    result[prepared.order] = out
    return result.T


def test_errors_are_passed_on_to_all_later_rows() -> None:
    groups = (Group(6, 32), Group(5, 64), Group(3, 64), Group(3, 32), Group(2, 128))
    weight, x = random_weight(32, 320), random_inputs(320)
    expected = by_rows(weight, x.T @ x, groups)
    decoded = dequantise_matrix(quantised(weight, x.T @ x, groups)).astype(np.float64)
    assert (np.abs(decoded - expected) > 1e-3 * np.abs(expected).max()).mean() < 0.01  # float32 rounds some the other way


@pytest.mark.parametrize("page_bytes", [4096, 3 << 15])
def test_a_weight_that_is_read_is_given_back_as_it_is_put_in_order(page_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 2 * COPIED + 40, 64
    weight, x = random_weight(n, k), random_inputs(k)
    array = np.empty((n, k), np.float32)
    given_back = [0]

    class Pages:
        def madvise(self, option: int, start: int, length: int) -> None:
            assert (option, start, length % page_bytes) == (mmap.MADV_DONTNEED, 0, 0)
            array.reshape(-1)[: length // 4] = np.nan
            given_back.append(length)

    def read(unread: Unread) -> tuple[np.ndarray, Pages]:
        unread.fill(array)
        return array, Pages()

    monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
    monkeypatch.setattr(Unread, "read", read)
    matrix = quantised(Unread((n, k), lambda out: np.copyto(out, weight)), x.T @ x, FOUR)
    expected = quantised(weight, x.T @ x, FOUR)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(matrix.arrays, expected.arrays, strict=True))
    assert given_back[-1] > array.nbytes - page_bytes


@pytest.mark.parametrize("hessian", [True, False])
def test_a_weight_that_is_read_gives_the_same_bytes(hessian: bool) -> None:
    weight, x = random_weight(COPIED + 40, 64), random_inputs(64)
    moments = x.T @ x if hessian else None
    matrix = quantised(Unread((COPIED + 40, 64), lambda out: np.copyto(out, weight)), moments, FOUR)
    expected = quantised(weight, moments, FOUR)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(matrix.arrays, expected.arrays, strict=True))


@pytest.mark.matrix
@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_threads() -> None:
    import torch

    weight, x = random_weight(96, 512), random_inputs(512)
    before, stored = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        m = quantised(weight, x.T @ x, tuple(Group(3, 128) for _ in range(4)))
        stored.append([array.tobytes() for array in m.arrays])
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert stored[0] == stored[1] == stored[2]


def test_inputs_that_are_always_zero_and_features_without_weights() -> None:
    x = random_inputs(64)
    x[:, ::2] = 0
    weight = random_weight(32, 64)
    weight[:, 40:] = 0
    weight[5] = 0
    decoded = dequantise_matrix(quantised(weight, x.T @ x, FOUR))
    assert np.isfinite(decoded).all()
    assert not decoded[5].any()
    assert not dequantise_matrix(quantised(np.zeros((32, 64), np.float32), np.zeros((64, 64), np.float32), FOUR)).any()


def test_a_weight_too_small_for_scales_becomes_zero() -> None:
    decoded = dequantise_matrix(quantised(random_weight(32, 64, scale=1e-8), None, FOUR))
    assert not decoded.any()


def test_columns_are_padded_with_zeros() -> None:
    m = quantised(random_weight(33, 64), None, FOUR)
    assert m.q_weight.shape == (8, padded(33)) == (8, 64)
    assert set(hexes(m.q_weight[:, 33:]).split()) == {"88888888"}
    assert not (m.q_scale.view(np.uint32)[0, 4:] >> np.uint32(4)).any()
    assert not dequantise_matrix(replace(m, out_features=64))[33:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 7e4])
@pytest.mark.parametrize("hessian", [None, np.eye(64, dtype=np.float32)])
def test_a_weight_that_float16_cannot_hold_is_rejected(value: float, hessian: np.ndarray | None) -> None:
    weight = random_weight(32, 64)
    weight[3, 5] = value
    with pytest.raises(NonFinite, match="float16"):
        quantised(weight, hessian, FOUR)


def test_a_hessian_that_cannot_be_used_is_rejected() -> None:
    with pytest.raises(NonFinite, match="Hessian"):
        prepare(np.full((32, 32), np.nan, np.float32))
    with pytest.raises(ParameterError, match="not positive definite"):
        prepare(np.diag(np.arange(-20, 12)).astype(np.float32))


# ---- what is rejected


ILLEGAL = [
    ("64 rows, 48 features", FOUR, 48, "48 input features, which must be a multiple of 32"),
    ("too many features", (Group(4, 65536),), 65536, "multiple of 32 up to 65,535"),
    ("7 bits", (Group(7, 64),), 64, "7 bits, which must be one of 2, 3, 4, 5, 6, 8"),
    (
        "ascending",
        (Group(3, 32), Group(4, 32)),
        64,
        "group 1 has 4 bits and follows one of 3: kernels read groups from the most",
    ),
    ("16 rows", (Group(4, 48), Group(2, 16)), 64, "group 0 has 48 rows, which must be a multiple of 32"),
    ("sum", (Group(4, 32),), 64, "its groups have 32 rows in total, and it has 64 input features"),
]


@pytest.mark.parametrize(("groups", "k", "why"), [case[1:] for case in ILLEGAL], ids=[case[0] for case in ILLEGAL])
def test_illegal_groups_are_rejected(groups: Groups, k: int, why: str) -> None:
    assert why in why_illegal(groups, k)
    with pytest.raises(Unsupported, match="cannot be stored as EXL2"):
        quantised(np.zeros((32, k), np.float32), None, groups)


def _repeated(q_invperm: np.ndarray) -> np.ndarray:
    permutation = q_invperm.copy()
    permutation[3] = permutation[4]
    return permutation


HOSTILE = {
    "ascending": ({"q_groups": np.array([2, 0, 3, 2, 5, 5, 8, 10], np.int16)}, "kernels read groups from the most bits"),
    "first": ({"q_groups": np.array([8, 1, 5, 8, 3, 13, 2, 16], np.int16)}, "28 rows"),
    "skipped": (
        {"q_groups": np.array([8, 1, 5, 9, 3, 14, 2, 17], np.int16), "q_weight": np.zeros((19, 32), np.int32)},
        "its groups begin at row 1 of q_weight",
    ),
    "backwards": ({"q_groups": np.array([8, 0, 5, 8, 3, 7, 2, 16], np.int16)}, "group 1 has rows 8 to 7"),
    "too far": ({"q_groups": np.array([8, 0, 5, 8, 3, 13, 2, 30], np.int16)}, "group 2 has rows 13 to 30"),
    "negative": ({"q_groups": np.array([8, 0, 5, 8, 3, -1, 2, 16], np.int16)}, "rows 8 to 65,535"),
    "no bits": ({"q_groups": np.array([8, 0, 5, 8, 0, 13, 2, 16], np.int16)}, "0 bits"),
    "negative bits": ({"q_groups": np.array([8, 0, 5, 8, -3, 13, 2, 16], np.int16)}, "-3 bits"),
    "odd": ({"q_groups": np.array([8, 0, 5], np.int16)}, "q_groups has 3 numbers"),
    "none": ({"q_groups": np.array([], np.int16)}, "q_groups has 0 numbers"),
    "scales": ({"q_scale_max": np.ones(3, np.float16)}, "q_scale_max has 3"),
    "infinite": ({"q_scale_max": np.array([1, 1, np.inf, 1], np.float16)}, "NaN or infinity"),
    "repeated": ({"q_invperm": _repeated(golden().q_invperm)}, "not a permutation"),
    "outside": ({"q_invperm": golden().q_invperm + 1}, "not a permutation"),
    "below": ({"q_invperm": golden().q_invperm - 1}, "not a permutation"),
    "short": ({"q_invperm": np.arange(96, dtype=np.int32)}, "128 rows in total, and it has 96 input features"),
    "long": ({"q_weight": np.zeros((20, 32), np.int32)}, "group 3 has 64 rows|160 rows"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_tensors_that_contradict_each_other_are_rejected(case: str) -> None:
    changes, why = HOSTILE[case]
    with pytest.raises(FormatError, match=why):
        dequantise_matrix(replace(golden(), **changes))


# ---- fixed groups


@pytest.mark.parametrize("encoding", ["w4a16", "w4a16-g32", "w8a16-g64", "gptq-4bit", "gptq-8bit-g64", "awq-4bit-g32"])
def test_integers_rounded_to_nearest_are_those_of_the_stored_format(encoding: str) -> None:
    weight = random_weight(24, 256)
    weight[3, :128] = 0
    kind, spec = find_encoding(encoding), TensorSpec("x.weight", DTYPES["F32"], weight.shape)
    outs = [np.empty(out.nbytes, np.uint8) for out in kind.outs(spec)]
    kind.encode(spec, weight, 0, outs, np.empty(0, np.float32))
    arrays = kind.quantise(weight, None, 1)
    for out, stored, array in zip(kind.outs(spec), outs, arrays, strict=True):
        assert (array.dtype, array.shape) == (out.dtype.numpy, out.shape)
        assert array.tobytes() == stored.tobytes(), out.name
    if encoding[0] != "w":
        assert np.linalg.norm(kind.dequantise(arrays, weight.shape) - weight) < 0.12 * np.linalg.norm(weight)
        return
    bits = int(encoding[1])
    words, scales = arrays[0].view(np.uint32), arrays[1].astype(np.float32)
    codes = np.stack([words >> np.uint32(bits * i) & np.uint32(2**bits - 1) for i in range(32 // bits)], -1).reshape(24, 256)
    expected = (codes.astype(np.float32) - 2 ** (bits - 1)) * np.repeat(scales, 256 // scales.shape[1], 1)
    np.testing.assert_array_equal(kind.dequantise(arrays, weight.shape), expected)


@pytest.mark.parametrize("encoding", ["w4a16", "gptq-4bit", "awq-4bit"])
def test_integers_with_a_hessian_change_the_output_less(encoding: str) -> None:
    weight, x, kind = random_weight(64, 256), random_inputs(256), find_encoding(encoding)
    y = x @ weight.T

    def error(hessian: FactoredHessian | None) -> float:
        decoded = kind.dequantise(kind.quantise(weight, hessian, 1), weight.shape)
        return float(np.linalg.norm(x @ decoded.T - y) / np.linalg.norm(y))

    assert error(None) > 1.35 * error(prepare(x.T @ x))


@pytest.mark.parametrize("encoding", ["w4a16", "w4a16-channel", "gptq-4bit", "awq-4bit"])
def test_a_range_is_narrowed_for_numbers_that_matter_less_than_their_neighbours(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x, kind = random_weight(64, 256), random_inputs(256), find_encoding(encoding)
    weight[:, ::32] *= 6
    x[:, ::32] *= 0.01
    hessian = prepare(x.T @ x)

    def error() -> float:
        decoded = kind.dequantise(kind.quantise(weight, hessian, 1), weight.shape)
        return float(np.linalg.norm(x @ (decoded - weight).T))

    narrowed = error()
    monkeypatch.setattr(hessians, "SHARES", hessians.SHARES[:1])
    assert narrowed < 0.8 * error()


def test_what_an_error_costs_is_what_later_features_cannot_make_up_for() -> None:
    x = random_inputs(128)
    hessian = prepare(x.T @ x)
    last = hessian.order[-1]
    damped = x.T @ x + np.eye(128, dtype=np.float32) * hessians.DAMPING * np.square(x).sum(0).mean()
    costs = CodesOf(hessian, 4).costs
    assert costs[last] == pytest.approx(damped[last, last], rel=1e-3)  # no feature follows it
    assert (costs <= damped.diagonal() * 1.001).all()


@pytest.mark.parametrize(("name", "other"), [("w4a16-g64", "gptq-4bit-g64"), ("w8a16", "gptq-8bit")])
def test_gptq_holds_the_numbers_of_packed_integers_with_and_without_a_hessian(name: str, other: str) -> None:
    weight, x = random_weight(64, 256), random_inputs(256)
    kinds = [find_encoding(kind_name) for kind_name in (name, other)]
    for hessian in (None, prepare(x.T @ x)):
        decoded = [kind.dequantise(kind.quantise(weight, hessian, 1), weight.shape) for kind in kinds]
        np.testing.assert_array_equal(*decoded)


def test_a_weight_that_is_no_number_is_refused() -> None:
    weight = random_weight(8, 128)
    weight[1, 2] = np.inf
    with pytest.raises(NonFinite, match="NaN or infinite"):
        find_encoding("w4a16").quantise(weight, None, 1)


@pytest.mark.parametrize("encoding", ["w4a16", "w4a16-channel", "gptq-4bit", "awq-4bit", "exl2 4/g32", "exl3 3"])
@pytest.mark.parametrize(("inputs", "side"), [(256, 128), (128, 256)], ids=["small", "large"])
def test_a_hessian_of_other_inputs_than_the_weight_is_refused(encoding: str, inputs: int, side: int) -> None:
    """Some codes would be memory that was never written."""
    kind, hessian = find_encoding(encoding), np.eye(side, dtype=np.float32)
    weight = random_weight(32, inputs)
    message = f"^a Hessian of {side} inputs for a weight of {inputs}$"
    for some in (weight, Unread(weight.shape, lambda array: None)):
        with pytest.raises(ParameterError, match=message):
            kind.quantise(some, hessian if kind.hessian == "whole" else prepare(hessian), 1)
