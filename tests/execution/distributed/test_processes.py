"""Several processes of this machine do one run: the bytes are those of one, also when some of them are killed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.execution.distributed.test_driver import MODEL_WIDE, SHARD, TIES
from tests.execution.test_run import files
from weightsmith._base import torch_use
from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    CheckpointError,
    LayerError,
    NonFinite,
    NoSpace,
    ParameterError,
    PlanError,
    WorkerLost,
)
from weightsmith._engine.products.thresholds import Thresholds
from weightsmith._execution import cluster, summary
from weightsmith._execution import processes as execution_processes
from weightsmith._execution.options import RunOptions, check_processes
from weightsmith._execution.processes import LocalWorkers
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.journal import read_journal
from weightsmith._outputs.locks import is_held, part_journals
from weightsmith._outputs.places import place_of
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner import loading

pytestmark = pytest.mark.process

COMMAND = """
import sys
from weightsmith._execution import cluster
cluster.PART_BYTES = 1 << 20
from weightsmith._app.cli import main
sys.argv = ["weightsmith", "merge", "ties.yml", "out", "--threads", "2", "--processes", "2"]
sys.argv += ["--max-shard-size", "500KB", "--no-check-loading"]
main()
"""
"""The command, in two processes of one thread."""
SLOW = """
import time
from weightsmith._engine import local
plain = local.Run._do
def slow(self, *arguments):
    time.sleep(0.5)
    return plain(self, *arguments)
local.Run._do = slow
"""
"""What makes each tile of each process slow."""


@pytest.fixture
def here(linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models, of which even small ones have several parts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "PART_BYTES", 1 << 20)
    return tmp_path


def merge(out: str = "out", recipe: Any = TIES, processes: int = 2, **overrides: Any) -> weightsmith.Merged:
    """A merge with one thread for each process."""
    options = {
        "threads": processes,
        "processes": processes,
        "progress": False,
        "fsync": False,
        "check_loading": False,
        "max_shard_bytes": SHARD,
    }
    return weightsmith.merge(recipe, out, **{**options, **overrides})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LocalWorkers]:
    """The workers of runs."""
    workers: list[LocalWorkers] = []
    plain = LocalWorkers.__init__

    def begin(self: LocalWorkers, n: int, options: RunOptions) -> None:
        workers.append(self)
        plain(self, n, options)

    monkeypatch.setattr(LocalWorkers, "__init__", begin)
    return workers


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [TIES, MODEL_WIDE], ids=["tensor", "model"])
def test_the_bytes_are_those_of_one_process(here: Path, started: list[LocalWorkers], recipe: Any) -> None:
    one = merge("one", recipe, processes=1)
    assert started == []
    reached: list[Any] = []
    many = merge("many", recipe, progress=reached.append)
    assert [workers.slots() for workers in started] == [2]
    assert files(here / "many") == files(here / "one")
    assert (many.resumed, many.written_bytes, many.read_bytes) == (0, one.written_bytes, one.read_bytes)
    assert many.warnings == one.warnings
    assert (reached[-1].written_bytes, reached[-1].tensors) == (reached[-1].total_bytes, len(many.plan.steps))
    assert not is_held(staging_folder(here / "many"))
    assert {path.name for path in here.iterdir() if path.name.startswith(".")} == set()


def test_a_run_that_cannot_be_divided_says_why(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def processes(recipe: Any = TIES, out: str = "out", **options: Any) -> int:
        with prepare_any(recipe, RecipeOptions(max_shard_bytes=SHARD, check_loading=False), QuantizeSettings()) as prepared:
            return check_processes(prepared, place_of(out), RunOptions(**{"threads": 32, "processes": 2, **options}))

    def refused(*arguments: Any, **options: Any) -> str:
        with pytest.raises(ParameterError) as raised:
            processes(*arguments, **options)
        assert "--processes" in raised.value.finding.fix
        assert raised.value.state == NOTHING_WRITTEN
        return raised.value.finding.what

    assert processes(processes=1, ray="local") == 1
    assert [processes(processes=n) for n in (2, 32)] == [2, 32]
    assert "fewer threads: 32" in refused(processes=33)
    assert "--max-memory" in refused(max_memory_bytes=1 << 30)
    assert "on the CPU" in refused(device="cuda")
    assert processes(MODEL_WIDE) == 2
    with monkeypatch.context() as patch:
        patch.setattr(Thresholds, "divisible", False)
        assert "products that one process makes" in refused(MODEL_WIDE)
    assert "bucket" in refused(out="s3://models/out")
    assert "--ray" in refused(ray="local")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "")
        assert "interpreter" in refused()
    monkeypatch.setattr(sys, "frozen", True, raising=False)  # a program that holds the interpreter: it has no `-c`
    assert "interpreter" in refused()


def test_a_process_does_no_part_by_itself(here: Path) -> None:
    plan = weightsmith.plan(TIES, max_shard_bytes=SHARD, check_loading=False)
    with pytest.raises(ParameterError, match="the processes do all parts"):
        weightsmith.run(plan, "out", part=(1, 2), threads=2, processes=2, progress=False)


def test_all_processes_start_before_the_first_has_read_a_long_order(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_processes, "_SERVE", "import time; time.sleep(600 + 0 * len('{path!s:.0}{fd}{order}'))")
    order = cluster.Order(b"x" * (1 << 20), "out", ".", RunOptions(), False, "", {})
    with LocalWorkers(3, RunOptions(threads=3)) as workers:
        workers.begin(order)
        for k in (1, 2, 3):
            workers.start(cluster.Share((k, 3)))
        assert [worker.process.poll() for worker in workers._processes.values()] == [None] * 3  # none was waited for


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced_and_the_run_says_so(
    here: Path, started: list[LocalWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    merge("one", processes=1)
    killed: list[int] = []

    def kill(_: object) -> None:
        if not killed and started and (running := [*started[-1]._processes.values()]):
            killed.append(running[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    many = merge("many", progress=kill)
    assert len(killed) == 1
    assert files(here / "many") == files(here / "one")
    lost = [str(warning) for warning in many.warnings if "was lost, and it is done again" in str(warning)]
    assert len(lost) == 1
    assert "signal 9 ended it" in lost[0]


@pytest.mark.slow
def test_processes_that_do_not_start_are_one_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_processes, "_SERVE", "raise SystemExit('no room: {fd} {path!s:.0}')")
    with pytest.raises(WorkerLost, match="was lost 4 times: it ended with status 1: no room") as raised:
        merge()
    assert "fewer --processes" in raised.value.finding.fix


def test_one_process_does_all_where_there_are_no_locks(
    here: Path, started: list[LocalWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    merged = merge("new/out")
    assert started == []
    assert [str(warning) for warning in merged.warnings if "this file system has no locks" in str(warning)]
    assert [path.name for path in (here / "new").iterdir()] == ["out"]


def test_a_check_that_fails_ends_the_processes_at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def answers(self: LocalWorkers, seconds: float) -> list[Any]:
        looks.append(seconds)
        assert len(looks) < 20, "the run goes on"
        time.sleep(seconds)
        return []

    monkeypatch.setattr(loading, "check_loading", lambda *_: LayerError("it could not be loaded"))
    monkeypatch.setattr(LocalWorkers, "start", lambda *_: None)
    monkeypatch.setattr(LocalWorkers, "answers", answers)
    with pytest.raises(PlanError, match="it could not be loaded") as raised:
        merge()
    assert raised.value.state == NOTHING_WRITTEN
    assert {path.name for path in here.iterdir() if path.name.startswith(".")} == set()


def replace_by_copy(path: Path) -> None:
    shutil.copy(path, "copy")
    Path("copy").replace(path)


@pytest.mark.parametrize("change", [replace_by_copy, Path.unlink])
def test_an_input_that_changes_before_the_start_is_named_at_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    plain = LocalWorkers.begin

    def begin(self: LocalWorkers, order: cluster.Order) -> None:
        change(here / "b/model.safetensors")
        plain(self, order)

    monkeypatch.setattr(LocalWorkers, "begin", begin)
    monkeypatch.setattr(cluster, "MISSING_SECONDS", 1.0)
    monkeypatch.setattr(cluster, "MISSING_PAUSE_SECONDS", 0.1)
    with pytest.raises(CheckpointError) as raised:
        merge()
    assert "b/model.safetensors" in str(raised.value)


def test_a_plan_counts_the_matrices_and_torch_of_each_process(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak_bytes(matrix_bytes: int, processes: int = 2) -> int:
        with prepare_any(TIES, RecipeOptions(max_shard_bytes=SHARD, check_loading=False), QuantizeSettings()) as prepared:
            return summary._memory(
                prepared, RunOptions(threads=2, processes=processes), place_of("out"), matrix_bytes
            ).peak_bytes

    in_two = peak_bytes(1000) - peak_bytes(0)
    assert in_two == 2 * (1000 + torch_use.installed_bytes())
    assert peak_bytes(1000, 1) - peak_bytes(0, 1) == 2 * 1000 + torch_use.installed_bytes()
    assert peak_bytes(0, 1) < peak_bytes(0)


@pytest.mark.slow
def test_a_program_that_changes_during_a_run_is_an_error_of_this_option(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "work_identity", lambda *_: "of the program before")
    with pytest.raises(ParameterError, match="has changed since this run began") as raised:
        merge()
    assert raised.value.finding.where == "--processes (processes)"
    assert raised.value.finding.fix == "Run the same command again."


def no_process(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_full_disk_of_temporary_files_is_one_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(execution_processes.tempfile, "TemporaryFile", full)
    with pytest.raises(NoSpace, match="the plan of the processes cannot be written: No space left on device") as caught:
        merge()
    assert caught.value.finding.where == tempfile.gettempdir()


@pytest.mark.slow
def test_a_process_that_cannot_be_started_is_one_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_process(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")))
    with pytest.raises(WorkerLost, match="a process cannot be started: Resource temporarily unavailable") as raised:
        merge()
    assert "--processes" in raised.value.finding.fix
    assert "Finished tensors are kept" in raised.value.state


def test_ctrl_c_while_a_process_is_started_is_no_other_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_process(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        merge()


def test_a_process_that_raises_is_told_by_its_error(
    here: Path, started: list[LocalWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = "import os, time, sys; os.close({fd}); time.sleep(0.3); sys.exit('no room: {path!s:.0}')"
    monkeypatch.setattr(execution_processes, "_SERVE", dying)
    with pytest.raises(WorkerLost, match="it ended with status 1: no room"):
        merge()


@pytest.mark.slow
def test_an_error_of_a_process_is_that_of_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from tests.mini import write_checkpoint

    tensors = {f"model.layers.{i}.mlp.up_proj.weight": np.ones((512, 512), np.float32) for i in range(4)}
    write_checkpoint(here / "good", tensors, {"model_type": "x"})
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = np.nan
    write_checkpoint(here / "bad", tensors, {"model_type": "x"})
    recipe = {"merge_method": "linear", "models": [{"model": "good"}, {"model": "bad"}], "parameters": {"weight": 0.5}}
    with pytest.raises(NonFinite) as one:
        merge("one", recipe, processes=1)
    with pytest.raises(NonFinite) as many:
        merge("many", recipe)
    assert many.value.finding == one.value.finding


def spawned(slow: str = SLOW) -> subprocess.Popen[str]:
    """The command in a session of its own, as in a terminal. slow: code for each of its processes."""
    Path("sitecustomize.py").write_text(slow)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + COMMAND],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def children_of(process: int) -> list[int]:
    below = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in below if b"processes import serve" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it takes too long"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def finished_tensors() -> int:
    return sum(len(read_journal(path).tensors) for path in part_journals(staging_folder(Path("out").absolute())))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kills_leave_no_process_and_work_that_is_resumed(here: Path, number: signal.Signals) -> None:
    merge("one", processes=1)
    Path("ties.yml").write_text(
        "merge_method: ties\nbase_model: ./a\nmodels:\n"
        "  - {model: ./b, parameters: {weight: 1, density: 0.4}}\n  - {model: ./c, parameters: {weight: 0.5}}\n"
        "parameters: {density: 0.3}\ndtype: bfloat16\n"
    )
    first = spawned()
    wait_until(lambda: finished_tensors() > 0 and len(children_of(first.pid)) == 2, first)
    children = children_of(first.pid)
    if number == signal.SIGINT:
        os.killpg(first.pid, number)  # as a terminal does
    else:
        first.kill()
    _, text = first.communicate(timeout=60)
    until = time.monotonic() + 20
    while any(Path(f"/proc/{child}/exe").exists() for child in children):
        assert time.monotonic() < until, "a process has stayed"
        time.sleep(0.05)
    if number == signal.SIGINT:
        assert first.returncode == 130
        assert text.count("Interrupted") == 1
        assert "Traceback" not in text
    second = spawned("")
    out, text = second.communicate(timeout=120)
    assert second.returncode == 0, text
    assert "by an earlier run" in out
    written, expected = files(here / "out"), files(here / "one")
    assert {name for name in written if written[name] != expected[name]} <= {"README.md", "recipe.yml", "weightsmith.json"}
    assert written.keys() == expected.keys() | {"recipe.yml"}


FORKED = """
import os, time
from weightsmith._execution.cluster import Order
from weightsmith._execution.options import RunOptions
from weightsmith._execution.processes import LocalWorkers
workers = LocalWorkers(1, RunOptions(threads=1))
workers.begin(Order(b"", "out", ".", RunOptions(), False, "", {}))
process = workers._new()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
time.sleep(3)
print(process.process.pid, child, flush=True)
time.sleep(60)
"""
"""A first process that has forked one, which holds its end of the pipe open."""


@pytest.mark.slow
def test_a_process_ends_with_the_first_also_if_that_has_forked_another() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", FORKED], env=environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        worker, forked = map(int, first.stdout.readline().split())
        try:
            assert Path(f"/proc/{worker}/exe").exists()
            first.kill()
            first.wait()
            until = time.monotonic() + 60  # it may still be importing
            while Path(f"/proc/{worker}/exe").exists():
                assert time.monotonic() < until, "a process has stayed"
                time.sleep(0.05)
        finally:
            os.kill(forked, signal.SIGKILL)
