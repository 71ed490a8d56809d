"""The benchmarks' judge must find what is wrong: a benchmark of wrong output is worth nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from benchmarks import models, reference
from benchmarks.check import check
from benchmarks.checkpoint import reserve, tensors
from benchmarks.floor import chunks, interleave, run
from benchmarks.jobs import JOBS, LINEAR_WEIGHTS
from benchmarks.process import check_same

pytestmark = pytest.mark.repository

BF16 = ml_dtypes.bfloat16
SIZE = 40_000


@pytest.fixture
def trio() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """bf16 [SIZE] base and two fine-tunes of it, with deltas that bf16 keeps well apart."""
    random = np.random.default_rng(0)
    base = (0.001 * random.standard_normal(SIZE)).astype(BF16)
    a, b = ((base.astype(np.float32) + 0.01 * random.standard_normal(SIZE)).astype(BF16) for _ in range(2))
    return base, a, b


def _dare_ties(trio, keep_a, keep_b, *, scale=2.0, elect=True):
    base, a, b = (t.astype(np.float64) for t in trio)
    da, db = scale * (a - base) * keep_a, scale * (b - base) * keep_b
    both = da + db
    if elect:
        sign = np.where(both >= 0, 1, -1)
        both = da * (np.sign(da) == sign) + db * (np.sign(db) == sign)
    return (base + both).astype(BF16)


def _replaced(values, value):
    values[7] = value
    return values


def _masks(density_a=0.5, density_b=0.5):
    random = np.random.default_rng(1)
    return random.random(SIZE) < density_a, random.random(SIZE) < density_b


def test_dare_ties_with_independent_masks_is_accepted(trio):
    problems, unexplained = reference.dare_ties_problems(_dare_ties(trio, *_masks()), *trio, 0.5)
    assert (problems, unexplained) == ([], 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda trio: _dare_ties(trio, *_masks(density_a=0.4)), id="one mask too thin"),
        pytest.param(lambda trio: _dare_ties(trio, *[_masks()[0]] * 2), id="one mask for both models"),
        pytest.param(lambda trio: _dare_ties(trio, *_masks(), scale=1.0), id="not rescaled"),
        pytest.param(lambda trio: _dare_ties(trio, *_masks(), elect=False), id="no sign election"),
        pytest.param(lambda trio: _replaced(_dare_ties(trio, *_masks()), 1.0), id="one element"),
        pytest.param(lambda trio: _replaced(_dare_ties(trio, *_masks()), np.nan), id="one NaN"),
    ],
)
def test_dare_ties_that_is_not_is_found(trio, wrong):
    problems, _ = reference.dare_ties_problems(wrong(trio), *trio, 0.5)
    assert problems


def test_ties_keeps_exactly_the_asked_number_and_of_equal_magnitudes_the_first():
    base = np.zeros(8, np.float32)
    model = np.float32([1, -1, 1, 1, -1, 1, 2, 0.5])
    assert reference.ties(base, [model], [1], 0.5).tolist() == [1, -1, 1, 0, 0, 0, 2, 0]


def test_ties_averages_the_models_that_agree_with_the_weighted_majority():
    base = np.float32([10, 10])
    low, high = np.float32([9, 9]), np.float32([14, 10.5])
    assert reference.ties(base, [low, high], [1, 1], 1.0).tolist() == [14.0, 9.0]
    assert reference.ties(base, [low, high], [5, 1], 1.0).tolist() == [9.0, 9.0]


def test_slerp_of_unit_vectors_stays_on_the_unit_circle():
    out = reference.slerp(np.float32([1, 0]), np.float32([0.6, 0.8]), 0.3)
    assert np.hypot(*out) == pytest.approx(1)
    assert np.arctan2(*out[::-1]) == pytest.approx(0.3 * np.arctan2(0.8, 0.6))


@pytest.fixture
def merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Synthetic models, and a right linear merge of them."""
    scale = dataclasses.replace(models.SCALES["toy"], hidden=16, layers=2, intermediate=24, vocab=40, heads=2)
    monkeypatch.setitem(models.SCALES, "toy", scale)
    folder = models.build("toy", tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    a, b = tensors(folder / "a"), tensors(folder / "b")
    for name, place in reserve(out, scale.shapes(), scale.max_shard_bytes).items():
        values = reference.linear([a[name].read(), b[name].read()], LINEAR_WEIGHTS)
        _write(place.file, place.offset, values.astype(BF16).tobytes())
    return folder, out


def _write(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def test_a_right_merge_is_accepted(merged):
    findings = check("linear", *merged)
    assert findings.problems == []
    assert 0.4 < findings.max_ulps < 0.5001


@pytest.mark.parametrize("value", [b"\x00\x40", b"\xc0\x7f"], ids=["2.0", "NaN"])
def test_one_wrong_element_is_found(merged, value):
    place = tensors(merged[1])["model.layers.1.mlp.up_proj.weight"]
    _write(place.file, place.offset + 10, value)
    findings = check("linear", *merged)
    assert findings.problems
    assert findings.off_share == 1 / findings.values


def test_a_missing_tensor_is_found(merged):
    file = merged[1] / "model.safetensors"
    _write(file, 8, file.read_bytes()[8:4096].replace(b'"lm_head.weight"', b'"lm_tail.weight"'))
    assert check("linear", *merged).problems == ["lm_head.weight: missing", "lm_tail.weight: not expected"]


def test_models_do_not_depend_on_the_threads_that_write_them(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "BLOCK_ELEMENTS", 1000)
    scale = dataclasses.replace(models.SCALES["toy"], hidden=16, layers=2, intermediate=24, vocab=400, heads=2)
    monkeypatch.setitem(models.SCALES, "toy", scale)
    one, three = (models.build("toy", tmp_path / str(n), threads=n) for n in (1, 3))
    for name in models.NAMES:
        assert (one / name / "model.safetensors").read_bytes() == (three / name / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_deltas_are_quantised_like_those_of_real_bf16_fine_tunes(tmp_path, monkeypatch):
    scale = dataclasses.replace(models.SCALES["toy"], layers=1)
    monkeypatch.setitem(models.SCALES, "toy", scale)
    folder = models.build("toy", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    base, a = (tensors(folder / model)[name].read().astype(np.float32) for model in ("base", "a"))
    assert 0.10 < np.mean(a == base) < 0.14
    assert np.std(a - base) == pytest.approx(models.DELTA_STD, rel=0.1)


def test_recipes_name_the_inputs_that_the_job_reads():
    for job in JOBS.values():
        recipe = job.recipe(Path("/m"), 22)
        assert {name for name in models.NAMES if f"/m/{name}" in recipe} == set(job.inputs)


def test_the_floor_moves_every_byte_once(tmp_path):
    source = tmp_path / "in"
    source.write_bytes(bytes(9_000_000))
    with source.open("rb") as reading, (tmp_path / "out").open("wb") as writing:
        jobs = interleave(
            [*chunks(reading.fileno(), 9_000_000, 4 << 20, False)], [*chunks(writing.fileno(), 5_000_000, 4 << 20, True)]
        )
        assert sum(nbytes for _, _, nbytes, write in jobs if not write) == 9_000_000
        run(jobs, threads=2, chunk_bytes=4 << 20)
    assert (tmp_path / "out").stat().st_size == 5_000_000


def test_the_floor_says_when_a_read_falls_short(tmp_path):
    source = tmp_path / "in"
    source.write_bytes(bytes(100))
    with source.open("rb") as reading, pytest.raises(OSError, match="read 100 of 101"):
        run([*chunks(reading.fileno(), 101, 4 << 20, False)], threads=1, chunk_bytes=4 << 20)


def test_outputs_that_differ_in_one_byte_are_not_the_same(tmp_path):
    for name, last in (("one", b"a"), ("same", b"a"), ("other", b"b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(100) + last)
    check_same(tmp_path / "one", tmp_path / "same")
    with pytest.raises(SystemExit, match=r"other/model.safetensors differs"):
        check_same(tmp_path / "one", tmp_path / "other")
