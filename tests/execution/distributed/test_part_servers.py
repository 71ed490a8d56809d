"""Parts of a plan, as processes that share nothing but a store: a server of each kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import weightsmith
from tests.bucket_help import AZURITE, GOOGLE, MOTO, SEAWEED, Server, environment_of
from tests.execution.distributed.test_bucket import SHARD, TIES
from tests.output_help import tree
from tests.outputs.bucket.conftest import front, new_server, ports, server, spool

pytestmark = [pytest.mark.process, pytest.mark.slow]

__all__ = ["front", "new_server", "ports", "server", "spool"]

SLOW = """
import sys
if "--part" in sys.orig_argv:
    import time
    from weightsmith._engine import local
    plain = local.Run._do
    def slow(self, *arguments):
        time.sleep(0.2)
        return plain(self, *arguments)
    local.Run._do = slow
"""
"""What makes each tile of a part slow."""


def started(words: list[str], server: Server, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "weightsmith", *words]
    sources = str(Path(weightsmith.__file__).parents[1])
    paths = [more["PYTHONPATH"], sources] if "PYTHONPATH" in more else [sources]
    return subprocess.Popen(command, env={**os.environ, **environment_of(server), "PYTHONPATH": os.pathsep.join(paths)})


@pytest.mark.parametrize("server", [MOTO, SEAWEED, GOOGLE, AZURITE], indirect=True)
def test_a_part_that_is_killed_is_run_again(
    linked: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has put a file by then. The other part runs meanwhile, and the last run publishes what both have made."""
    pytest.importorskip("obstore", reason="outputs in buckets need obstore")
    monkeypatch.chdir(tmp_path)
    Path("slow").mkdir()
    Path("slow/sitecustomize.py").write_text(SLOW)
    plan = weightsmith.plan(TIES, max_shard_bytes=SHARD, check_loading=False)
    Path("plan.json").write_text(json.dumps(plan.to_json()))
    assert started(["run", "plan.json", "alone/out", "--threads", "1", "--quiet"], server, {}).wait(300) == 0

    def run(*options: str, disk: str, **more: str) -> subprocess.Popen[bytes]:
        words = ["run", "plan.json", server.address("x/out"), *options, "--staging", disk, "--threads", "1", "--quiet"]
        return started(words, server, more)

    first, second = run("--part", "1/2", disk="one", PYTHONPATH="slow"), run("--part", "2/2", disk="two")
    try:
        while not any(name.endswith(".safetensors") for name in server.names("x/out")):
            assert first.poll() is None or second.poll() is None
            time.sleep(0.05)
        assert first.poll() is None, "it is too fast"
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert second.wait(300) == 0
    builders = weightsmith.status(server.address("x/out")).builders
    assert sorted(builder.done for builder in builders) in ([True], [False, True])
    assert run("--part", "1/2", disk="another").wait(300) == 0
    assert [builder.done for builder in weightsmith.status(server.address("x/out")).builders] == [True, True]
    assert run(disk="last").wait(300) == 0
    assert server.contents("x") == {f"out/{name}": data for name, data in tree(tmp_path / "alone/out").items()}
    assert server.uploads() == []
