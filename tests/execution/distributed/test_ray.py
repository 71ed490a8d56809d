"""On a Ray cluster of two machines, simulated on this one: the bytes are those of one process, also when a machine dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.bucket_help import Server
from tests.execution.test_run import files
from tests.output_help import tree
from tests.outputs.bucket.conftest import front, moto, new_server, ports, spool
from weightsmith._app.cli.failures import Exit, exit_code
from weightsmith._base.errors import NOTHING_WRITTEN, NonFinite, ParameterError, WeightsmithError, WorkerLost
from weightsmith._base.installation import install
from weightsmith._execution import on_ray
from weightsmith._execution.options import RunOptions
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.locks import is_held

pytestmark = pytest.mark.process

__all__ = ["front", "moto", "new_server", "ports", "spool"]

TIES = """merge_method: ties
base_model: ./a
models:
  - {model: ./b, parameters: {weight: 1, density: 0.4}}
  - {model: ./c, parameters: {weight: 0.5, density: 0.2}}
parameters: {scope: model}
dtype: bfloat16
"""
SHARD = 500_000
SLOW = """
import time
from weightsmith._engine import local
plain = local.Run._do
def slow(self, *arguments):
    time.sleep(0.3)
    return plain(self, *arguments)
local.Run._do = slow
"""


@pytest.fixture
def here(linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ties.yml").write_text(TIES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[Any]:
    """A head that does no work, and two machines of one processor. They are slow: 0.3 s for a tile."""
    pytest.importorskip("ray", reason="needs ray")
    from ray.cluster_utils import Cluster

    (folder / "sitecustomize.py").write_text(SLOW)
    paths = [str(folder), str(Path(weightsmith.__file__).parents[1]), str(Path(__file__).parents[3])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray_cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            ray_cluster.machines = [ray_cluster.add_node(num_cpus=1) for _ in range(2)]
            yield ray_cluster
        finally:
            ray_cluster.shutdown()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`two_machines`, of which the last test kills one."""
    with two_machines(tmp_path_factory.mktemp("slow")) as ray_cluster:
        yield ray_cluster


def processes_of(machine: Any, title: bytes) -> list[int]:
    """The processes of a machine of the cluster that do something: Ray puts it into their command lines."""
    raylet, pids = machine.all_processes["raylet"][0].process.pid, []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == raylet and (process / "cmdline").read_bytes().startswith(title):
                pids.append(int(process.name))
    return pids


@pytest.fixture
def store(moto: Server) -> Server:
    """A bucket that machines which are started later find in their environment."""
    return moto


@pytest.mark.slow
def test_the_command_starts_a_cluster_and_leaves_no_process(here: Path) -> None:
    pytest.importorskip("ray", reason="needs ray")
    environment = {**os.environ, "PYTHONPATH": str(Path(weightsmith.__file__).parents[1])}
    command = [sys.executable, "-m", "weightsmith", "merge", "ties.yml"]
    subprocess.run([*command, "whole", "--quiet"], env=environment, check=True, timeout=100)
    ran = subprocess.run(
        [*command, "out", "--ray", "local"], env=environment, check=False, timeout=100, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "10 tensors" in ran.stdout
    assert "saving to disk: 100%" in ran.stderr
    assert "ray" not in ran.stderr.lower()
    assert files(here / "out") == files(here / "whole")
    listed = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
    running = [line for line in listed.splitlines() if not line.startswith("Z")]  # an init may be slow to collect the ended
    assert not [line for line in running if "ray::" in line]


def raylets_below(process: int) -> list[int]:
    """Processes of Ray's that manage this machine, started by a process or by those that it has started."""
    lines = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1:]
    listed = [(int(pid), int(parent), args) for pid, parent, args in (line.split(None, 2) for line in lines)]
    below = {process}
    for _ in range(3):
        below |= {pid for pid, parent, _ in listed if parent in below}
    return [pid for pid, _, args in listed if pid in below and args.split()[0].endswith("raylet/raylet")]


@pytest.mark.slow
def test_ray_dies_and_the_command_says_so_and_keeps_the_work(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("ray", reason="needs ray")
    slow = tmp_path_factory.mktemp("slow")
    only = "import sys\nif any('default_worker' in word for word in sys.orig_argv):"
    (slow / "sitecustomize.py").write_text(only + SLOW.replace("\n", "\n    "))
    paths = [str(slow), str(Path(weightsmith.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAY_raylet_start_wait_time_s": "3600"}
    options = ["--ray", "local", "--threads", "1", "--max-shard-size", "500kB", "--no-check-loading"]
    command = [sys.executable, "-m", "weightsmith", "merge", "ties.yml", "out", *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        deadline, parts = time.monotonic() + 300, staging_folder(here / "out") / "parts"
        while not any(path.stat().st_size > 200 for path in parts.glob("journal-*-of-*")):
            assert time.monotonic() < deadline, "no tensor is finished"
            assert ran.poll() is None, ran.stderr.read() if ran.stderr else ""
            time.sleep(0.05)
        (raylet,) = raylets_below(ran.pid)
        os.kill(raylet, signal.SIGKILL)
        _, errors = ran.communicate(timeout=300)
    assert ran.returncode == 5, errors
    assert "error[worker-lost]: --ray (ray): Ray has ended the process that gives out the parts" in errors
    assert "Finished tensors are kept in" in errors
    assert 0 < weightsmith.merge("ties.yml", "out", progress=False, max_shard_bytes=SHARD).resumed
    weightsmith.merge("ties.yml", "whole", progress=False, max_shard_bytes=SHARD)
    assert files(here / "out") == files(here / "whole")


def test_ray_that_never_answers_is_an_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine so busy that the first processes of a new cluster come too late: Ray then waits for ever."""
    pytest.importorskip("ray", reason="needs ray")
    monkeypatch.setattr(on_ray, "_SERVE", "import time; time.sleep(600); {path!s:.0}{fd}")
    monkeypatch.setattr(on_ray, "JOIN_SECONDS", 1.0)
    with pytest.raises(WorkerLost, match="Ray does not start, or lets nobody join, within 1 s") as raised:
        weightsmith.merge("ties.yml", "out", ray="local", progress=False, check_loading=False)
    assert raised.value.state == NOTHING_WRITTEN
    assert exit_code(raised.value) == Exit.INPUT_FAILED
    assert list(here.glob(".out*")) == []


LISTENING = """
import json, os
from pathlib import Path
from weightsmith._execution.on_ray import RayWorkers
from weightsmith._execution.options import RunOptions
with RayWorkers.connect(RunOptions(ray="local")) as workers:
    import psutil
    import ray
    folder = Path(ray._private.worker._global_node.get_temp_dir_path())
    me = psutil.Process()
    processes = [me, *me.children(recursive=True)]
    hosts = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"]
    around = folder.parent.stat()
    names = sorted({name for p in processes for name in [p.name()]})
print(json.dumps([hosts, oct(around.st_mode & 0o777), around.st_uid == os.getuid(), folder.parent.exists(), names]))
"""


@pytest.mark.slow
def test_nobody_else_reaches_a_cluster_of_ours(here: Path) -> None:
    """Its processes listen on this machine alone, its files are in a folder of mode 0700, and nothing stays."""
    pytest.importorskip("ray", reason="needs ray")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(Path(weightsmith.__file__).parents[1]), "HOME": str(here / "home")}
    (here / "home").mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", LISTENING], env=environment, check=False, timeout=100, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    hosts, mode, ours, remained, names = json.loads(ran.stdout.splitlines()[-1])
    assert {"gcs_server", "raylet"} <= set(names)
    assert len(hosts) >= 3
    assert {host.removeprefix("::ffff:") for host in hosts} == {"127.0.0.1"}
    assert (mode, ours, remained) == ("0o700", True, False)
    assert not list((here / "home").rglob("*token*"))


def test_without_ray_the_option_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ParameterError, match="Ray is not installed") as caught:
        weightsmith.merge("ties.yml", "out", ray="auto")
    assert install("ray") in str(caught.value)
    assert not staging_folder(here / "out").exists()


@pytest.mark.parametrize(("address", "error"), [("local", WorkerLost), ("host:1", ParameterError)])
def test_a_cluster_that_does_not_start_is_no_mistake_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, address: str, error: type[WeightsmithError]
) -> None:
    pytest.importorskip("ray", reason="needs ray")

    def fail(*_: object) -> None:
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(on_ray, "_join", fail)
    with pytest.raises(error, match="timed out during startup") as raised, on_ray.RayWorkers.connect(RunOptions(ray=address)):
        pass
    assert exit_code(raised.value) == (Exit.INPUT_FAILED if error is WorkerLost else Exit.PROBLEMS)


def test_ray_dies_while_the_command_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "_SERVE", "raise SystemExit(len('{fd}{path!s:.0}'))")
    with pytest.raises(WorkerLost, match="Ray has ended the process") as raised:
        on_ray.WatchedWorkers(RunOptions(ray="local"))
    assert raised.value.state == NOTHING_WRITTEN
    assert exit_code(raised.value) == Exit.INPUT_FAILED


def test_a_client_s_address_is_refused(here: Path) -> None:
    with pytest.raises(ParameterError, match="only machines of the cluster can give out parts"):
        weightsmith.merge("ties.yml", "out", ray="ray://head:10001")


# ---- a cluster of two machines: after the tests that look for processes of Ray


@pytest.mark.slow
@pytest.mark.sweep
def test_two_machines_write_to_a_bucket_and_one_dies(
    here: Path, store: Server, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    weightsmith.merge("ties.yml", "out", progress=False, max_shard_bytes=SHARD)
    with two_machines(tmp_path_factory.mktemp("slow")) as cluster:
        merge_while_one_dies(cluster, f"s3://{store.bucket}/x/out", monkeypatch)
    assert store.contents("x") == {f"out/{name}": data for name, data in tree(here / "out").items()}
    assert store.uploads() == []


def merge_while_one_dies(cluster: Any, out: str, monkeypatch: pytest.MonkeyPatch) -> weightsmith.Merged:
    """A merge on the cluster, of which one machine is killed when two tensors are finished."""
    monkeypatch.setattr("weightsmith._execution.cluster.PART_BYTES", 1 << 20)
    lost: list[str] = []
    take = on_ray.WatchedWorkers.answers

    def answers(self: on_ray.WatchedWorkers, seconds: float) -> Any:
        taken = take(self, seconds)
        lost.extend(answer.why for _, answer in taken if isinstance(answer, on_ray.Lost))
        return taken

    monkeypatch.setattr(on_ray.WatchedWorkers, "answers", answers)

    killed: list[int] = []

    def progress(now: weightsmith.Progress) -> None:
        if now.tensors >= 2 and not killed:
            for machine in cluster.machines:
                if busy := processes_of(machine, b"ray::_do"):
                    killed.extend(busy)
                    for process in (machine.all_processes["raylet"][0].process.pid, *busy):
                        os.kill(process, signal.SIGKILL)
                    return

    merged = weightsmith.merge("ties.yml", out, progress=progress, ray=cluster.address, max_shard_bytes=SHARD)
    assert killed
    assert lost
    return merged


@pytest.mark.slow
def test_an_error_of_a_worker_and_ctrl_c_are_those_of_one_process(here: Path, cluster: Any, tmp_path: Path) -> None:
    import numpy as np

    from tests.cli_help import CONFIG
    from tests.mini import write_checkpoint

    for name, value in (("d", np.nan), ("e", 1.0)):
        write_checkpoint(tmp_path / name, {"norm": np.full(4, value, np.float32)}, CONFIG)
    recipe = {"merge_method": "linear", "models": [{"model": f"./{m}", "parameters": {"weight": 1}} for m in "de"]}
    with pytest.raises(NonFinite) as alone:
        weightsmith.merge(recipe, "one", progress=False)
    with pytest.raises(NonFinite) as caught:
        weightsmith.merge(recipe, "two", progress=False, ray=cluster.address)
    assert str(caught.value) == str(alone.value)

    def progress(now: weightsmith.Progress) -> None:
        if now.tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weightsmith.merge("ties.yml", "out", progress=progress, ray=cluster.address)
    deadline = time.monotonic() + 120
    while is_held(staging_folder(here / "out")):
        assert time.monotonic() < deadline, "a worker still runs"
        time.sleep(0.1)
    assert 0 < weightsmith.merge("ties.yml", "out", progress=False).resumed


@pytest.mark.slow
def test_one_of_two_machines_dies_half_way_and_the_bytes_are_the_same(
    here: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weightsmith.merge("ties.yml", "whole", progress=False, max_shard_bytes=SHARD)
    merged = merge_while_one_dies(cluster, "out", monkeypatch)
    assert merged.resumed == 0
    assert files(here / "out") == files(here / "whole")
    assert not staging_folder(here / "out").exists()
