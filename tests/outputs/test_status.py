"""`weightsmith status`: who builds an output and how far it is, without a lock."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import weightsmith
from tests.cli_help import Cli, cli, environment, work
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.bucket import decode_claim

__all__ = ["cli", "work"]

SHARD = 100
"""So that there are several files, which parts are made of."""


STOPPED = """
import os, weightsmith
from weightsmith._outputs.staging import Staging
finish = Staging.finish
def finished(self, *about):
    finish(self, *about)
    if len(self.finished) == 2:
        os._exit(9)
Staging.finish = finished
weightsmith.merge("linear.yml", "out", progress=False, threads=1)
"""


def killed() -> None:
    """A merge in another process, which ends when two tensors are finished."""
    subprocess.run([sys.executable, "-c", STOPPED], env=environment(), check=False)


def test_an_output_that_is_complete_and_one_that_is_not_there(work: Path) -> None:
    with pytest.raises(weightsmith.NotFound, match="no output and no unfinished work"):
        weightsmith.status("out")
    weightsmith.merge("linear.yml", "out", progress=False)
    status = weightsmith.status("out")
    assert (status.published, status.folder, status.builders) == (True, None, ())


def test_a_run_in_this_process_while_it_runs(work: Path) -> None:
    seen = []
    weightsmith.merge("linear.yml", "out", progress=lambda now: seen.append(weightsmith.status("out")), threads=1)
    [builder] = seen[-1].builders
    assert (builder.part, builder.process, builder.running) == ("", os.getpid(), True)
    assert 0 < builder.began <= builder.changed
    assert not seen[-1].published
    counted = [(status.tensors, status.total) for status in seen]
    assert counted == sorted(counted)
    assert counted[-1] == (6, 6)


@pytest.mark.long
def test_a_run_that_was_killed(work: Path) -> None:
    killed()
    status = weightsmith.status("out")
    [builder] = status.builders
    assert (builder.running, builder.done, status.total) == (False, False, 6)
    assert status.tensors == 2
    assert status.folder == staging_folder(work / "out")
    lock = staging_folder(work / "out") / "lock"
    lock.write_text("process 1 on elsewhere")
    [builder] = weightsmith.status("out").builders
    assert (builder.machine, builder.running) == ("elsewhere", None)
    lock.write_text(f"process {10**30} on {socket.gethostname()}")
    [builder] = weightsmith.status("out").builders
    assert builder.running is False
    weightsmith.merge("linear.yml", "out", progress=False)
    assert weightsmith.status("out").published


@pytest.mark.long
def test_an_output_that_is_published_while_it_is_looked_at(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(folder: Path) -> None:
        monkeypatch.undo()
        monkeypatch.chdir(work)
        weightsmith.merge("linear.yml", "out", progress=False)

    killed()
    monkeypatch.setattr("weightsmith._outputs.places.check_kinds", check)
    status = weightsmith.status("out")
    assert (status.published, status.folder) == (True, None)


def test_parts_are_counted_each_and_together(work: Path) -> None:
    plan = weightsmith.plan("linear.yml", max_shard_bytes=SHARD)
    weightsmith.run(plan, "out", part=(2, 3), progress=False)
    status = weightsmith.status("out")
    whole, part = status.builders
    assert (whole.part, whole.process, whole.running) == ("", 0, None)
    assert (part.part, part.process, part.done) == ("2-of-3", os.getpid(), True)
    assert 0 < part.tensors == part.total == status.tensors == whole.tensors < status.total == 6
    for k in (1, 3):
        weightsmith.run(plan, "out", part=(k, 3), progress=False)
    assert weightsmith.status("out").tensors == 6
    weightsmith.run(plan, "out", progress=False)
    assert weightsmith.status("out").published


def test_a_folder_of_somebody_else_is_refused(work: Path) -> None:
    staging_folder(work / "out").mkdir()
    (staging_folder(work / "out") / "mine").write_text("x")
    with pytest.raises(weightsmith.StoreError, match="was not created by weightsmith"):
        weightsmith.status("out")


def test_what_the_command_prints(cli: Cli, work: Path) -> None:
    killed()
    ran = cli("status", "out")
    assert ran.code == 0
    assert "out: 2 of 6 tensors are finished" in ran.out
    assert "all" in ran.out
    assert "ended" in ran.out
    ran = cli("status", "out", "--json")
    answer = json.loads(ran.out)
    assert (answer["out"], answer["published"], answer["total"]) == ("out", False, 6)
    assert answer["builders"][0]["tensors"] == answer["tensors"]
    ran = cli("status", "nowhere")
    assert ran.code == 3
    assert "error[not-found]: nowhere: no output" in ran.err


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux says it in /proc")
def test_a_process_that_is_stopped_is_not_said_to_run(work: Path, cli: Cli) -> None:
    killed()
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            (staging_folder(work / "out") / "lock").write_text(f"process {process.pid} on {socket.gethostname()}")
            [builder] = weightsmith.status("out").builders
            assert (builder.running, builder.stopped) == (True, False)
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            [builder] = weightsmith.status("out").builders
            assert (builder.running, builder.stopped) == (True, True)
            assert "stopped" in cli("status", "out").out
        finally:
            process.kill()


def test_a_claim_with_a_number_that_no_process_has_is_of_none() -> None:
    """Anyone who may write into the bucket may have written it."""
    data = json.dumps(["weightsmith claim", "t", "plan", 10**30, socket.gethostname(), "/nowhere", False])
    claim = decode_claim(data.encode(), "s3://bucket/claim")
    assert not claim.is_running
    assert claim.is_lost
