"""Blocks of our own kernels: byte for byte those of libgguf, which is ggml's code compiled."""

from __future__ import annotations

import libgguf
import numpy as np
import pytest

from weightsmith._kernels import ggml
from weightsmith._kernels.ggml import ENCODED
from weightsmith._kernels.ggml_fits import LANES
from weightsmith._models.formats.gguf.layout import TYPE_IDS
from weightsmith._models.formats.gguf.writing import TYPES, quantise

Numbers = np.ndarray
COLS = 512

RNG = np.random.default_rng(0)


def powers(low: int, high: int, group: int) -> Numbers:
    """Normal numbers, each group of a row times another power of ten."""
    scales = 10.0 ** RNG.integers(low, high, (9, COLS // group)).repeat(group, 1)
    return RNG.normal(size=(9, COLS)) * scales


ROWS: dict[str, Numbers] = {
    "normal": RNG.normal(size=(9, COLS)),
    "bf16": (RNG.normal(size=(9, COLS)) * 0.02).astype(np.float32).view(np.uint32) & 0xFFFF0000,
    "heavy tails": RNG.normal(size=(9, COLS)) ** 5,
    "outliers": np.where(RNG.random((9, COLS)) < 0.005, 1000, 0.01) * RNG.normal(size=(9, COLS)),
    "mostly zero": np.where(RNG.random((9, COLS)) < 0.9, 0, RNG.normal(size=(9, COLS))),
    "zero": np.zeros((9, COLS)),
    "minus zero": -np.zeros((9, COLS)),
    "constant groups": RNG.normal(size=(9, COLS // 16)).repeat(16, 1),
    "one sign": abs(RNG.normal(size=(9, COLS))) + 3,
    "other sign": -abs(RNG.normal(size=(9, COLS))) - 3,
    "few integers": RNG.integers(-3, 4, (9, COLS)),
    "halves": RNG.integers(-9, 10, (9, COLS)) / 2,
    "groups of other sizes": powers(-12, 6, 16),
    "subnormal": powers(-45, -5, COLS),
    "where a half ends": powers(-10, -4, 32),
    "beyond a half": powers(3, 7, COLS),
    "near the largest": powers(30, 38, COLS),
}
ROWS["bf16"] = ROWS["bf16"].astype(np.uint32).view(np.float32)
IMPORTANCES: dict[str, Numbers | None] = {
    "none": None,
    "even": np.random.default_rng(1).random(COLS),
    "with zeros": np.where(np.random.default_rng(2).random(COLS) < 0.3, 0, np.random.default_rng(3).random(COLS) ** 8 * 100),
}


def theirs(kind: str, rows: Numbers, importances: Numbers | None) -> Numbers:
    out = np.zeros(rows.size // TYPES[kind].block * TYPES[kind].itemsize, np.uint8)
    libgguf.quantize_rows_into_raw(TYPE_IDS[kind], rows, out, len(rows), rows.shape[1], importances)
    return out


def ours(kind: str, rows: Numbers, importances: Numbers | None) -> Numbers:
    out = np.zeros(rows.size // TYPES[kind].block * TYPES[kind].itemsize, np.uint8)
    quantise(TYPES[kind], rows, out, importances)
    return out


@pytest.mark.matrix("Q8_0-none", "Q4_0-none")
@pytest.mark.parametrize("importances", IMPORTANCES)
@pytest.mark.parametrize("kind", sorted(ENCODED))
def test_the_bytes_are_ggmls(kind: str, importances: str) -> None:
    weights = IMPORTANCES[importances]
    as_float32 = None if weights is None else weights.astype(np.float32)
    rows = np.concatenate([*ROWS.values()]).astype(np.float32)
    expected, actual = theirs(kind, rows, as_float32), ours(kind, rows, as_float32)
    blocks = (expected.reshape(len(rows), -1) != actual.reshape(len(rows), -1)).any(1).reshape(len(ROWS), 9)
    assert {name: int(count) for name, count in zip(ROWS, blocks.sum(1), strict=True) if count} == {}


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("rows", [1, LANES // 2, LANES // 2 + 1])
def test_any_number_of_blocks(kind: str, rows: int) -> None:
    numbers = RNG.normal(size=(rows, COLS)).astype(np.float32)
    assert ours(kind, numbers, None).tobytes() == theirs(kind, numbers, None).tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_left_to_ggml(value: float) -> None:
    rows = RNG.normal(size=(3, COLS)).astype(np.float32)
    rows[1, 7] = value
    assert ours("Q6_K", rows, None).tobytes() == theirs("Q6_K", rows, None).tobytes()


@pytest.mark.sweep
@pytest.mark.parametrize("kind", sorted(ENCODED))
def test_ten_million_numbers(kind: str) -> None:
    rng = np.random.default_rng(7)
    for seed in range(20):
        rows = rng.normal(size=(1024, COLS)) * 10.0 ** rng.integers(-9, 3, (1024, COLS // 32)).repeat(32, 1)
        rows = (rows.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000 if seed % 2 else 0xFFFFFFFF)).view(np.float32)
        weights = None if seed % 3 else rng.random(COLS).astype(np.float32)
        assert ours(kind, rows, weights).tobytes() == theirs(kind, rows, weights).tobytes()


@pytest.mark.parametrize(
    ("kind", "encoder"),
    [
        ("Q4_K", "encode_with_offsets"),
        ("Q3_K", "encode_q3_k"),
        ("Q6_K", "encode_q6_k"),
        ("IQ4_NL", "encode_iq4"),
        ("Q5_0", "encode_32"),
    ],
)
def test_importances_of_a_plan_which_may_not_be_written_compile_no_kernel_again(
    kind: str, encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays: list[np.ndarray] = []
    monkeypatch.setattr(ggml, encoder, lambda *args: arrays.extend(x for x in args if isinstance(x, np.ndarray)))
    importances = np.ones(COLS, np.float32)
    importances.flags.writeable = False
    ours(kind, np.ones((1, COLS), np.float32), importances)
    assert len(arrays) == 3
    assert all(x.flags.writeable for x in arrays)
