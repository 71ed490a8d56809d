"""The totals of a plan, from Python and from the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import weightsmith
from tests.cli_help import Cli
from tests.cli_help import cli as cli
from tests.cli_help import work as work
from tests.mini import write_checkpoint
from weightsmith._execution import progress
from weightsmith._execution.options import RunOptions

TIES = {
    "merge_method": "ties",
    "base_model": "a",
    "models": [{"model": "b", "parameters": {"weight": 1, "density": 0.5}}],
    "dtype": "float32",
}
LINEAR = {"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}], "parameters": {"weight": 1}}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of past runs."""
    path = tmp_path / "cache/runs.jsonl"
    monkeypatch.setenv("WEIGHTSMITH_RUNS", str(path))
    return path


def test_without_a_file_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = progress.PastRun("ties", "", "cpu", 2, False, 100, 10.0)
    for chosen in ("", None):
        monkeypatch.delenv("WEIGHTSMITH_RUNS", raising=False) if chosen is None else monkeypatch.setenv(
            "WEIGHTSMITH_RUNS", chosen
        )
        progress.remember(run)
        assert (tmp_path / "weightsmith/runs.jsonl").exists() == (chosen is None)


def test_python_and_the_command_line_give_the_same_totals(cli: Cli, work: Path) -> None:
    (work / "ties.yml").write_text(json.dumps(TIES))
    summary = weightsmith.plan("ties.yml").summary(threads=3)
    assert json.loads(cli("plan", "ties.yml", "--threads", "3", "--json").out)["summary"] == json.loads(
        json.dumps(summary.to_json())
    )
    merged = weightsmith.merge("ties.yml", "out", progress=False)
    assert summary.write_bytes == sum(path.stat().st_size for path in Path("out").glob("*.safetensors"))
    assert summary.input_bytes <= merged.read_bytes <= summary.read_bytes
    assert "with 3 threads" in str(summary)


def test_bytes_read_of_a_quantised_model_are_those_that_it_has_in_its_files(work: Path) -> None:
    write_checkpoint(work / "wide", {"model.layers.0.mlp.up_proj.weight": np.ones((256, 256), np.float32)}, config={})
    weightsmith.quantize("wide", "narrow", "fp8-dynamic", progress=False)
    recipe = LINEAR | {"models": [{"model": "narrow"}]}
    summary = weightsmith.plan(recipe).summary()
    stored = sum(path.stat().st_size for path in Path("narrow").glob("*.safetensors"))
    assert (summary.input_bytes, summary.stored_bytes) == (weightsmith.open_checkpoint("narrow").nbytes, stored)
    assert summary.stored_bytes < summary.input_bytes
    assert summary.read_bytes == stored
    assert "decoded" in str(summary)
    merged = weightsmith.merge(recipe, "merged", progress=False)
    copied = weightsmith.merge({"merge_method": "passthrough", "models": [{"model": "narrow"}]}, "copied", progress=False)
    assert abs(merged.read_bytes - stored) < 4
    assert abs(copied.read_bytes - stored) < 4


def test_each_pass_over_a_quantised_model_counts_what_is_stored(work: Path) -> None:
    for name in ("wide", "other"):
        write_checkpoint(work / name, {"model.layers.0.mlp.up_proj.weight": np.ones((256, 256), np.float32)}, config={})
        weightsmith.quantize(name, f"{name}-8", "fp8-dynamic", progress=False)
    summary = weightsmith.plan(
        TIES | {"base_model": "wide-8", "models": [{"model": "other-8", "parameters": {"weight": 1, "density": 0.5}}]}
    ).summary()
    assert summary.passes > 1
    assert summary.read_bytes == summary.passes * summary.stored_bytes < summary.passes * summary.input_bytes


def test_plain_models_are_read_as_they_are_stored(work: Path) -> None:
    summary = weightsmith.plan(LINEAR).summary()
    assert summary.stored_bytes == summary.input_bytes
    assert summary.read_bytes == summary.input_bytes
    assert "decoded" not in str(summary)


@pytest.mark.long
def test_tensors_take_memory(work: Path) -> None:
    peaks = []
    for number in (10, 2010):
        write_checkpoint(work / f"m{number}", {f"layers.{i}.w": np.ones(2, np.float32) for i in range(number)}, config={})
        recipe = LINEAR | {"models": [{"model": f"m{number}"}]}
        peaks.append(weightsmith.plan(recipe).summary(threads=1).memory.peak_bytes)
    assert peaks[1] - peaks[0] == 2 * 2000 * 1_000


@pytest.mark.long
def test_a_memory_that_does_not_hold_the_records_of_the_tensors_is_refused(work: Path) -> None:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": np.ones((2, 2), np.float32) for i in range(12_000)}
    write_checkpoint(work / "many", tensors, config={})
    recipe = LINEAR | {"models": [{"model": "many"}]}
    needed = weightsmith.plan(recipe).summary(threads=1, max_memory_bytes=200_000_000).memory.peak_bytes
    assert 170_000_000 < needed < 200_000_000
    options = {"threads": 1, "max_memory_bytes": 170_000_000, "progress": False, "fsync": False}
    message = r"24\.0 MB of it for the records of its tensors.*max_memory is 170 MB"
    with pytest.raises(weightsmith.ParameterError, match=message):
        weightsmith.merge(recipe, "out", **options)
    with pytest.raises(weightsmith.ParameterError, match=message):
        weightsmith.quantize("many", "out", "fp8-dynamic", **options)
    assert not Path("out").exists()


def test_what_is_decoded_takes_more_memory(work: Path) -> None:
    for name in ("plain", "wide"):
        weights = {f"model.layers.{i}.mlp.up_proj.weight": np.ones((8, 32), np.float32) for i in range(100)}
        write_checkpoint(work / name, weights, config={})
    weightsmith.quantize("wide", "narrow", "fp8-dynamic", progress=False)
    peaks = [
        weightsmith.plan(LINEAR | {"models": [{"model": name}]}).summary(threads=1).memory.peak_bytes
        for name in ("plain", "narrow")
    ]
    assert peaks[1] - peaks[0] == 100 * 2_500


def test_models_that_have_changed_since_are_no_longer_those_of_the_plan(work: Path) -> None:
    plan = weightsmith.plan(LINEAR)
    write_checkpoint(work / "a", {"other": np.ones(2, np.float32)}, config={})
    with pytest.raises(weightsmith.PlanError):
        plan.summary()


def test_similar_runs_give_the_time(work: Path, cache: Path) -> None:
    plan = weightsmith.plan(LINEAR)
    options = RunOptions(threads=2)
    assert plan.summary(threads=2).time is None
    for seconds in (10.0, 20.0, 60.0):
        progress.remember(progress.past_run(plan, options, 10**6, seconds))
    summary = plan.summary(threads=2)
    assert summary.time is not None
    moved = summary.read_bytes + summary.write_bytes
    assert (summary.time.seconds, summary.time.runs) == (round(20e-6 * moved, 1), 3)
    assert "by 3 similar runs on this machine" in str(summary)
    assert plan.summary(threads=1).time is None
    assert plan.summary(threads=2, device="cuda").time is None


def test_a_much_smaller_run_says_nothing_of_the_speed(work: Path, cache: Path) -> None:
    options = RunOptions(threads=2)
    plan = weightsmith.plan(LINEAR)
    summary = plan.summary(threads=2)
    moved = summary.read_bytes + summary.write_bytes
    progress.remember(progress.past_run(plan, options, moved // 11, 10.0))
    assert plan.summary(threads=2).time is None
    progress.remember(progress.past_run(plan, options, moved // 9, 10.0))
    time = plan.summary(threads=2).time
    assert time is not None
    assert time.runs == 1


def test_a_short_run_says_nothing_of_the_speed(work: Path, cache: Path) -> None:
    weightsmith.merge(LINEAR, "out", progress=False)
    assert not cache.exists()


@pytest.mark.parametrize("damage", [b"\x00\xff", b"[1, 2]", b'{"method": 3}', b"[" * 100_000])
def test_a_damaged_line_is_left_out(damage: bytes, work: Path, cache: Path) -> None:
    plan = weightsmith.plan(LINEAR)
    run = progress.past_run(plan, RunOptions(threads=2), 10**6, 10.0)
    progress.remember(run)
    cache.write_bytes(damage + b"\n" + cache.read_bytes())
    summary = plan.summary(threads=2)
    assert summary.time is not None
    assert summary.time.runs == 1


def test_a_file_of_something_else_is_neither_read_nor_replaced(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    run = progress.PastRun("ties", "", "cpu", 2, False, 100, 10.0)
    cache.write_text("my notes\n")
    progress.remember(run)
    assert cache.read_text() == "my notes\n"
    cache.unlink()
    os.mkfifo(cache)  # to open it would wait for ever
    progress.remember(run)
    assert cache.is_fifo()


def test_numbers_of_any_size_are_read(cache: Path) -> None:
    line = {"method": "ties", "format": "", "device": "cpu", "threads": 2, "streamed": False}
    cache.parent.mkdir(parents=True)
    values = [(10**400, "10.0"), (1, "Infinity"), (1, "NaN"), (7, "10.0")]
    cache.write_text(
        "".join(f'{json.dumps(line)[:-1]}, "nbytes": {nbytes}, "seconds": {seconds}}}\n' for nbytes, seconds in values)
    )
    assert [run.nbytes for run in progress._runs()] == [7]


def test_the_oldest_runs_make_room(work: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_RUNS", 2)
    plan = weightsmith.plan(LINEAR)
    for seconds in (10.0, 20.0, 30.0):
        progress.remember(progress.past_run(plan, RunOptions(threads=2), 10**6, seconds))
    assert [json.loads(line)["seconds"] for line in cache.read_text().splitlines()] == [20.0, 30.0]
