"""kill -9 of any process of a run at any moment: the exit code is right, and the same command resumes to the same bytes.

`WEIGHTSMITH_KILLS=30` sets how many moments are tried of each kind of run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import weightsmith
from tests.execution.distributed.test_ray import TIES
from tests.execution.test_run import files
from weightsmith._base.errors import NOTHING_WRITTEN

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.sweep, pytest.mark.timeout(7200)]

MOMENTS = int(os.environ.get("WEIGHTSMITH_KILLS", "6"))
OPTIONS = ["--threads", "2", "--max-shard-size", "500KB", "--no-check-loading"]
SLOW = """
import sys
if any("default_worker" in word or "weightsmith" in word for word in sys.orig_argv):
    import time
    from weightsmith._engine import local
    from weightsmith._execution import cluster
    cluster.PART_BYTES = 1 << 20
    plain = local.Run._do
    def slow(self, *arguments):
        time.sleep(0.15)
        return plain(self, *arguments)
    local.Run._do = slow
"""
"""What makes each tile of each process slow."""
PORTS = """
import sys
if any("import serve" in word for word in sys.orig_argv):
    import importlib, socket
    from weightsmith._execution import on_ray
    join = on_ray._join
    def joined(*arguments):
        ray, services = (importlib.import_module(name) for name in ("ray._raylet", "ray._private.services"))
        start = services.start_raylet
        def started(*arguments, **more):
            with socket.create_server(("127.0.0.1", 0)) as server:
                more["runtime_env_agent_port"] = server.getsockname()[1]
            ports = dict.fromkeys((ray.METRICS_AGENT_PORT_NAME, ray.METRICS_EXPORT_PORT_NAME), -1)
            ports |= {ray.DASHBOARD_AGENT_LISTEN_PORT_NAME: -1, ray.RUNTIME_ENV_AGENT_PORT_NAME: more["runtime_env_agent_port"]}
            for name, port in ports.items():
                ray.persist_port(arguments[11], arguments[2], name, port)
            return start(*arguments, **more)
        services.start_raylet = started
        join(*arguments)
    on_ray._join = joined
"""
"""What writes the ports of a raylet's agents before they start: a raylet that waits for them for 15 s ends."""
GONE_SECONDS = 300.0
"""After these, no process of a run is there."""
IDLE_SECONDS = 120.0
"""Processes that use no processor for so long make no progress, on a busy machine too."""
START_SECONDS = 120
"""How long Ray waits for its processes to start: also for a raylet that is gone, so a kill at the start costs as much."""
STARTS = 10
"""Attempts to start Ray: a raylet whose agent needs more than 15 s to start ends, and that limit cannot be set."""
PAUSE_SECONDS = 0.2
"""Between two looks at the processes of a command: each costs some milliseconds."""


@pytest.fixture
def here(linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models, a recipe, and what one process makes of it."""
    monkeypatch.chdir(tmp_path)
    Path("ties.yml").write_text(TIES.replace("scope: model", "density: 0.3"))
    Path("slow").mkdir()
    Path("slow/sitecustomize.py").write_text(SLOW + PORTS)
    Path("fast").mkdir()
    Path("fast/sitecustomize.py").write_text(PORTS)
    undisturbed("merge", "ties.yml", "whole", *OPTIONS, slow=False)
    with Path("plan.json").open("w") as plan:
        subprocess.run(command("plan", "ties.yml", *OPTIONS, "--json"), stdout=plan, env=environment(slow=False), check=True)
    return tmp_path


def environment(*, slow: bool) -> dict[str, str]:
    paths = ["slow" if slow else "fast", str(Path(weightsmith.__file__).parents[1])]
    paths = [str(Path(path).absolute()) for path in paths]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAY_raylet_start_wait_time_s": f"{START_SECONDS}"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "weightsmith", *words]


def started(*words: str, slow: bool = True) -> subprocess.Popen[bytes]:
    """A command, whose output goes to files: nobody reads a pipe until all that hold it have ended."""
    variables = environment(slow=slow)
    with Path("out.txt").open("wb") as out, Path("errors.txt").open("wb") as errors:
        return subprocess.Popen(command(*words), env=variables, stdout=out, stderr=errors)


def wait(ran: subprocess.Popen[bytes], tree: dict[int, str] | None = None) -> int:
    """The exit code of a command that goes on as long as its processes compute. tree: gets all of them."""
    spent, since = -1, time.monotonic()
    while ran.poll() is None:
        alive = below(ran.pid)
        if tree is not None:
            tree |= alive
        if (now := ticks(alive)) != spent:
            spent, since = now, time.monotonic()
        assert time.monotonic() - since < IDLE_SECONDS, ("they do nothing", alive, Path("errors.txt").read_text())
        time.sleep(PAUSE_SECONDS)
    return ran.returncode


def ticks(processes: Iterable[int]) -> int:
    """The time of processors that processes have used."""
    total = 0
    for pid in processes:
        with contextlib.suppress(OSError, ValueError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total


def undisturbed(*words: str, slow: bool = True) -> float:
    """Run a command, none of whose processes is killed: its seconds. It ends well."""
    for attempt in range(STARTS):
        began = time.monotonic()
        status, errors = wait(started(*words, slow=slow)), Path("errors.txt").read_text()
        if status == 0 or attempt == STARTS - 1 or "Ray does not start here" not in errors:
            assert status == 0, errors
            break
    return time.monotonic() - began


def below(process: int) -> dict[int, str]:
    """A process and those that it has started, and they: their commands."""
    parents = dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(folder.name)] = int(fields[1])
    tree = {process}
    while children := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= children
    words = dict[int, str]()
    for pid in sorted(tree & parents.keys()):
        with contextlib.suppress(OSError):
            words[pid] = words_of(pid)
    return words


def words_of(pid: int) -> str:
    """The beginning of a process's command. Raises OSError if it has ended."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:300]


@dataclass(frozen=True)
class Kill:
    """What was killed, when, and how the command ended."""

    seconds: float
    victim: str
    status: int
    errors: str

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s {self.victim}: {self.status}"


def kill_one(words: list[str], moment: random.Random, most_seconds: float) -> Kill | None:
    """Run a command, and kill one of its processes; None if it has ended before. All its processes end."""
    ran = started(*words)
    seconds = moment.uniform(0, most_seconds)
    until, tree = time.monotonic() + seconds, dict[int, str]()
    while time.monotonic() < until and ran.poll() is None:
        tree |= below(ran.pid)
        time.sleep(PAUSE_SECONDS)
    alive = below(ran.pid)
    if ran.poll() is not None or not alive:
        assert ran.wait() == 0, Path("errors.txt").read_text()
        return None
    victim = moment.choice(sorted(alive))
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    wait(ran, tree)
    until = time.monotonic() + GONE_SECONDS
    while remaining := [pid for pid, text in tree.items() if pid != ran.pid and is_there(pid, text)]:
        assert time.monotonic() < until, [tree[pid] for pid in remaining]
        time.sleep(0.1)
    what = "the command" if victim == ran.pid else alive[victim]
    return Kill(seconds, what, ran.returncode, Path("errors.txt").read_text(errors="replace"))


def is_there(pid: int, words: str) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and words_of(pid) == words
    return False


def check(kill: Kill, *, alone: bool = False) -> None:
    """The exit code and the message. alone: the command is one process."""
    if kill.victim == "the command":
        assert kill.status == -signal.SIGKILL, (str(kill), kill.errors)
        return
    assert not alone
    assert kill.status in (0, 5), (str(kill), kill.errors)
    assert "Traceback" not in kill.errors, (str(kill), kill.errors)
    if kill.status:
        assert "error[worker-lost]" in kill.errors, (str(kill), kill.errors)
        assert "Finished tensors are kept" in kill.errors or NOTHING_WRITTEN in kill.errors, (str(kill), kill.errors)


def resumed(*words: str) -> None:
    """The same command ends well, with the bytes of one process."""
    undisturbed(*words, slow=False)
    written, whole = files(Path("out")), files(Path("whole"))
    assert {name for name in written if written[name] != whole.get(name)} <= {"README.md"}
    assert written.keys() == whole.keys()


def duration(words: list[str]) -> float:
    """Seconds of a run that nobody disturbs; its output is removed."""
    seconds = undisturbed(*words)
    subprocess.run(["rm", "-rf", "out"], check=True)
    return seconds


def moments(kind: str, here: Path) -> Iterator[random.Random]:
    """The random numbers of each moment. Before it, there is no output."""
    for i in range(MOMENTS):
        for path in [*here.glob("out"), *here.glob(".out*")]:
            subprocess.run(["rm", "-rf", str(path)], check=True)
        yield random.Random(f"{kind} {i}")


def survives_one(here: Path, words: list[str], moment: random.Random, most_seconds: float) -> bool:
    """Kill one process of a command: whether the command has ended well all the same."""
    kill = kill_one(words, moment, most_seconds)
    if kill is None:
        return False
    print(kill, flush=True)
    check(kill)
    if not kill.status:
        assert files(here / "out").keys() == files(here / "whole").keys()
    return not kill.status


def test_any_of_several_processes(here: Path) -> None:
    words = ["merge", "ties.yml", "out", *OPTIONS, "--processes", "2"]
    seconds = duration(words)
    for moment in moments("processes", here):
        if survives_one(here, words, moment, seconds):
            continue
        resumed(*words, *(["--overwrite"] if (here / "out").exists() else []))


def test_a_part_and_the_last_run(here: Path) -> None:
    words = ["run", "plan.json", "out", "--threads", "1"]
    seconds = duration(words)
    for moment in moments("parts", here):
        undisturbed(*words, "--part", "2/2", slow=False)
        part = moment.random() < 0.7
        if kill := kill_one([*words, "--part", "1/2"] if part else words, moment, seconds * (0.6 if part else 1)):
            print(kill, "part" if part else "all", flush=True)
            check(kill, alone=True)
            assert not (here / "out").exists()
        if not (here / "out").exists():
            resumed(*words)


def test_any_process_of_a_ray_cluster(here: Path) -> None:
    pytest.importorskip("ray", reason="needs ray")
    words = ["merge", "ties.yml", "out", *OPTIONS[2:], "--threads", "1", "--ray", "local"]
    seconds = duration(words)
    for moment in moments("ray", here):
        if survives_one(here, words, moment, seconds):
            continue
        if not (here / "out").exists():
            resumed(*words[:-2])
