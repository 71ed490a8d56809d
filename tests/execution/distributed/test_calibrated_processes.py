"""Several processes of one machine calibrate: all of them quantise weights, and the bytes are those of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.execution.test_run import files
from weightsmith._base import torch_use
from weightsmith._base.errors import ParameterError
from weightsmith._execution.processes import LocalWorkers
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.locks import is_held

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.calibration_help import TEXT, save_model

pytestmark = [pytest.mark.process, pytest.mark.slow]

NOTED = """
import sys
if any("processes import serve" in word for word in sys.orig_argv):
    import os, threading, time
    from weightsmith._features.quantisation.calibration import layer
    from weightsmith._outputs.shared import TaskBoard

    plain, has_helpers = layer.quantise_task, TaskBoard.has_helpers

    def noted(task, *more):
        with open("tasks.txt", "a") as file:
            file.write(f"{os.getpid()} {threading.current_thread().name} {' '.join(task['weights'])}\\n")
        time.sleep(0.3)
        return plain(task, *more)

    seen = []

    def wait(self):
        until = time.monotonic() + 60
        while not has_helpers(self) and not seen and time.monotonic() < until:
            time.sleep(0.02)
        seen.append("")
        return has_helpers(self)

    layer.quantise_task, TaskBoard.has_helpers = noted, wait
    object.__setattr__(layer.QUANTISED, "help", noted)
"""
"""What makes each process note its tasks, and the first one wait for the others."""
LEADER = "weightsmith-product"
"""The thread that computes products."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("w4a16", {}),
    "awq": ("awq-4bit", {}),
    "exl2": ("exl2", {"bits": 4.1}),
    "exl3": ("exl3", {"bits": 2}),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_model(Path("model"), "llama-128")
    Path("text.txt").write_text(TEXT)
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text(NOTED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), *sys.path]))
    return tmp_path


def quantise(out: str, case: str = "gptq", processes: int = 1, **overrides: Any) -> weightsmith.Merged:
    """A calibrated checkpoint, from one thread of each process."""
    format, settings = CASES[case]
    options = {"threads": processes, "processes": processes, "progress": False, "fsync": False, "check_loading": False}
    text = {"calibration": "text.txt", "calibration_rows": 4, "calibration_tokens": 24}
    return weightsmith.quantize("model", out, format=format, **{**options, **text, **settings, **overrides})


def tasks() -> list[list[str]]:
    """Process, thread and weights of each task that was begun."""
    path = Path("tasks.txt")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_one_process(here: Path, case: str) -> None:
    quantise("one", case)
    assert tasks() == []
    many = quantise("many", case, processes=2)
    assert files(here / "many") == files(here / "one")
    assert len({process for process, *_ in tasks()}) == 2, "both quantised weights"
    names = [name for _, _, *weights in tasks() for name in weights]
    assert len(names) == len(set(names)), "none was quantised twice"
    assert not [str(warning) for warning in many.warnings if "had work" in str(warning)]
    assert {path.name for path in here.iterdir() if path.name.startswith(".")} == set()


def test_the_progress_counts_the_products_of_the_layers(here: Path) -> None:
    reached: list[weightsmith.Progress] = []
    quantise("many", processes=2, progress=reached.append)
    shown = [now.computation for now in reached if now.waiting and now.computation is not None]
    assert {computation.doing for computation in shown} >= {"quantising layer by layer"}
    assert [computation.done for computation in shown] == sorted(computation.done for computation in shown)
    assert all(0 < computation.done < computation.total for computation in shown)


@pytest.mark.parametrize("who", ["leader", "helper"])
def test_what_a_killed_process_was_at_the_others_do(here: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    quantise("one")
    killed: list[int] = []

    def kill(_: object) -> None:
        begun = [int(process) for process, thread, *_ in tasks() if (thread == LEADER) == (who == "leader")]
        if begun and not killed:
            killed.append(begun[-1])
            os.kill(killed[0], signal.SIGKILL)

    many = quantise("many", processes=2, progress=kill)
    assert len(killed) == 1
    assert files(here / "many") == files(here / "one")
    lost = [str(warning) for warning in many.warnings if "was lost, and it is done again" in str(warning)]
    assert len(lost) == (who == "leader"), "the leader's share is done again; what a helper was at, the leader does"


def test_a_killed_command_is_resumed_with_any_number_of_processes(here: Path) -> None:
    quantise("one")
    options = "--threads 2 --processes 2 --format w4a16 --calibration text.txt --calibration-rows 4 --calibration-tokens 24"
    words = [sys.executable, "-m", "weightsmith", "quantize", "model", "out", *options.split()]
    first = subprocess.Popen(words, stderr=subprocess.PIPE)
    wait_until(lambda: len(tasks()) > 4, first)
    first.kill()
    first.communicate()
    until = time.monotonic() + 60
    while is_held(staging_folder(here / "out")):  # the others notice that it is gone
        assert time.monotonic() < until, "a process has stayed"
        time.sleep(0.05)
    quantise("out")
    written, whole = files(here / "out"), files(here / "one")
    assert written.keys() == whole.keys()
    assert {name for name in written if written[name] != whole[name]} <= {"README.md", "weightsmith.json"}


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it takes too long"
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_the_leader_has_all_threads_while_it_runs_the_text(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, int]] = []
    plain = LocalWorkers.start

    def start(self: LocalWorkers, share: Any) -> None:
        plain(self, share)
        pipe = self._processes[self._running[share]]
        sent.append((share, self.threads_of(share)))
        assert pipe.process.poll() is None

    monkeypatch.setattr(LocalWorkers, "start", start)
    quantise("many", processes=2, threads=4)
    by_share = dict(sent)
    assert [threads for share, threads in by_share.items() if share.part is None and not share.helper] == [4]
    assert {threads for share, threads in by_share.items() if share.helper or share.part is not None} == {2}


def test_a_plan_counts_the_memory_of_the_processes_that_help(here: Path) -> None:
    def promised(processes: int) -> int:
        options = {"calibration": "text.txt", "calibration_rows": 4, "calibration_tokens": 24}
        plan = weightsmith.plan_quantize("model", format="w4a16", check_loading=False, **options)
        return plan.summary(threads=2, processes=processes).memory.peak_bytes

    from weightsmith._execution.together import TASK_FACTOR

    largest = 4 * (128 * 128 + 2 * 96 * 128)  # gate and up, and the Hessian of what enters both
    helper = torch_use.installed_bytes() + TASK_FACTOR * max(largest, 4 * (128 * 128 + 3 * 128 * 128))
    assert promised(2) - promised(1) >= helper
    assert promised(2) - promised(1) < helper + (200 << 20)


def test_a_limit_of_memory_is_still_refused(here: Path) -> None:
    with pytest.raises(ParameterError, match="--max-memory is for one process"):
        quantise("out", processes=2, max_memory_bytes=4 << 30)
