"""The workers of a Ray cluster (https://docs.ray.io): each share is a Ray task, in a process that Ray keeps for the next one.

Ray only finds the machine and starts the process. It does not repeat tasks (`max_retries=0`), because the driver must know,
and it moves no tensors: the plan's JSON goes to each machine once, and all else through the shared folder or the bucket.

When Ray's own processes on a machine die, Ray silently ends the process that has joined its cluster. So `watched`
joins in a process of its own: when that ends, the driver says so, and ends as after any other loss.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

from weightsmith._base.errors import NOTHING_WRITTEN, ParameterError, WorkerLost, first_line
from weightsmith._base.installation import install
from weightsmith._base.options import named
from weightsmith._base.redaction import know
from weightsmith._base.torch_use import named_device
from weightsmith._execution.cluster import Answer, Lost, Order, Share, Workers, do, portable
from weightsmith._execution.options import RunOptions

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

AUTO = "auto"
"""The cluster of this machine, or a new one."""
LOCAL = "local"
"""A new cluster on this machine, for this command alone."""
NODES_SECONDS = 2.0
"""How long the list of machines is used before Ray is asked again."""


ADVICE = "read the logs of Ray; if the machines are short of memory, lower --max-memory or --threads"
END_SECONDS = 60.0
"""How long a cluster of this command may take to end."""
JOIN_SECONDS = 300.0
"""How long Ray may take to start, or to be joined."""
REGISTER_SECONDS = 240
"""How long Ray waits for the first processes of a cluster of this command. If they come later, it waits for ever."""


class RayWorkers:
    """Workers on the machines of a Ray cluster. Each has `--threads` processors, by default all of the smallest machine."""

    setting, advice, several_machines = "ray", ADVICE, True

    def __init__(self, ray: Any, options: RunOptions) -> None:
        """Use `RayWorkers.connect`."""
        self._ray = ray
        self._threads = options.threads
        self._memory_bytes = options.max_memory_bytes
        self._gpus = 0 if named_device(options.device).startswith("cpu") else 1
        self._task = ray.remote(max_retries=0, scheduling_strategy="SPREAD")(_do)
        self._order: Any = None
        self._running: dict[Share, Any] = {}
        self._nodes: list[Mapping[str, float]] = []
        self._asked = -NODES_SECONDS

    @classmethod
    @contextmanager
    def connect(cls, options: RunOptions) -> Iterator[RayWorkers]:
        """Join the cluster that `options.ray` names, or start one. Raises ParameterError; WorkerLost if it does not start."""
        address = options.ray or AUTO
        _check_address(address)
        try:
            ray = import_module("ray")
        except ImportError:
            raise _not_installed() from None
        ours = not ray.is_initialized()
        if ours:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or a warning in each worker
        with ExitStack() as stack:
            if ours:
                stack.callback(ray.shutdown)
                try:
                    _join(ray, address, stack)
                except Exception as error:  # what Ray raises depends on where it fails
                    if address == LOCAL:  # the recipe and the options are right
                        what, fix = f"Ray does not start here: {first_line(error)}", "run again, or leave out --ray"
                        raise WorkerLost(what, where=named("ray"), fix=fix, state=NOTHING_WRITTEN) from error
                    fix = "start a cluster with: ray start --head; or let this command start one with --ray local"
                    what = f"no cluster at {address}: {first_line(error)}"
                    raise ParameterError(what, where=named("ray"), fix=fix) from error
            workers = cls(ray, options)
            try:
                yield workers
            finally:
                for share in list(workers._running):
                    workers.stop(share)

    def begin(self, order: Order) -> None:
        """Put the order into the cluster. A machine gets it from the first one that has it."""
        self.slots()
        self._order = self._ray.put(replace(order, options=replace(order.options, threads=self._cpus)))

    def slots(self) -> int:
        """Workers that fit on the machines that are there now. Raises ParameterError if none fits on any of them."""
        now = time.monotonic()
        if now - self._asked > NODES_SECONDS:
            alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
            self._asked, self._nodes = now, alive or self._nodes
        memory = self._memory_bytes
        if memory is not None and self._nodes and all(node.get("memory", 0) < memory for node in self._nodes):
            most = max(int(node.get("memory", 0)) for node in self._nodes)
            what = f"a worker may have {memory:,} bytes, and the largest machine of the cluster has {most:,} for all of them"
            raise ParameterError(what, where=named("max_memory_bytes"), fix="write less, or leave it out")
        return max(1, sum(self._fit(node) for node in self._nodes))

    def _fit(self, node: Mapping[str, float]) -> int:
        """Workers that a machine can run at once."""
        by_cpus = int(node["CPU"]) // self._cpus
        return by_cpus if self._memory_bytes is None else min(by_cpus, int(node.get("memory", 0)) // self._memory_bytes)

    @property
    def _cpus(self) -> int:
        """Processors of a worker."""
        all_cpus = [int(node["CPU"]) for node in self._nodes] or [1]
        return min(self._threads or min(all_cpus), max(all_cpus))

    def start(self, share: Share) -> None:
        """Start a worker on a machine that Ray chooses."""
        resources: dict[str, Any] = {"num_cpus": self._cpus}
        if self._memory_bytes is not None:
            resources["memory"] = self._memory_bytes
        if self._gpus and share.part is None and not share.helper:
            resources["num_gpus"] = self._gpus
        self._running[share] = self._task.options(**resources).remote(self._order, share)

    def answers(self, seconds: float) -> list[tuple[Share, Answer]]:
        """The answers of the workers that have ended. seconds: to wait for the first of them."""
        if not self._running:
            time.sleep(seconds)
            return []
        shares = {ref: share for share, ref in self._running.items()}
        self._ray.wait(list(shares), num_returns=1, timeout=seconds)
        ended, _ = self._ray.wait(list(shares), num_returns=len(shares), timeout=0)
        answers: list[tuple[Share, Answer]] = []
        for ref in ended:
            del self._running[shares[ref]]
            answers.append((shares[ref], self._answer(ref)))
        return answers

    def _answer(self, ref: Any) -> Answer:
        try:
            return pickle.loads(self._ray.get(ref))
        except self._ray.exceptions.RayError as error:
            return Lost(first_line(error))

    def stop(self, share: Share) -> None:
        """End the worker of a share, if it still runs."""
        if (ref := self._running.pop(share, None)) is not None:
            self._ray.cancel(ref, force=True)


def _check_address(address: str) -> None:
    if "://" in address:
        what = f"{address}: only machines of the cluster can give out parts and publish"
        raise ParameterError(what, where=named("ray"), fix="run the command on one of them, with --ray auto")


def _not_installed() -> ParameterError:
    return ParameterError("Ray is not installed", where=named("ray"), fix=f"run {install('ray')}")


# ---- in a process of their own


@contextmanager
def watched(options: RunOptions) -> Iterator[Workers]:
    """`RayWorkers.connect` in a process of its own; in this one if it has joined a cluster already, or has no pipes for it.

    Raises ParameterError as `RayWorkers.connect`. The workers raise WorkerLost once Ray has ended that process.
    """
    _check_address(options.ray or AUTO)
    ray = sys.modules.get("ray")
    if ray is None and ("ray" in sys.modules or find_spec("ray") is None):
        raise _not_installed()
    if os.name != "posix" or (ray is not None and ray.is_initialized()):
        with RayWorkers.connect(options) as workers:
            yield workers
        return
    with WatchedWorkers(options) as workers:
        yield workers


_SERVE = "import sys; sys.path[:] = {path!r}; from weightsmith._execution.on_ray import serve; serve({fd})"


class WatchedWorkers:
    """Workers of a cluster that another process has joined: it does what the methods of `RayWorkers` do, and answers."""

    setting, advice, several_machines = "ray", ADVICE, True

    def __init__(self, options: RunOptions) -> None:
        """Start the process, and have it join. Raises as `RayWorkers.connect`."""
        from multiprocessing.connection import Pipe

        self._asked = 0
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._pipe, theirs = Pipe()
        code = _SERVE.format(path=sys.path, fd=theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        theirs.close()
        try:
            token = self._ask("", options, seconds=JOIN_SECONDS)
        except BaseException as error:
            self._end()
            if isinstance(error, WorkerLost):
                error.state = NOTHING_WRITTEN
            raise
        if token:
            know(token)

    def __enter__(self) -> WatchedWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        """The process leaves the cluster when it reads no more."""
        self._pipe.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _ask(self, name: str, *arguments: object, seconds: float = math.inf) -> Any:
        """What the process answers. seconds: after these, Ray is taken for dead, and the process is killed."""
        self._asked += 1
        deadline = time.monotonic() + seconds
        try:
            self._pipe.send((self._asked, name, arguments))
            number = 0
            while number != self._asked:  # an answer may be left of a call that Ctrl-C interrupted
                while not self._pipe.poll(0.2):
                    if time.monotonic() > deadline:
                        self._process.kill()
                        raise WorkerLost(
                            f"Ray does not start, or lets nobody join, within {seconds:.0f} s",
                            where=named("ray"),
                            fix="run again when this machine has less to do; if it happens again, read the logs of Ray, or "
                            "leave out --ray",
                        )
                number, error, value = self._pipe.recv()
        except (EOFError, OSError) as lost:
            raise self._lost() from lost
        if error is not None:
            raise error
        return value

    def _lost(self) -> WorkerLost:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - (1 << 14)))
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        causes = [line for line in lines if "died" in line or "Error" in line]
        return WorkerLost(
            "Ray has ended the process that gives out the parts: its own processes on this machine are gone",
            where=named("ray"),
            details=causes[-1:],
            fix="run the same command again; if it happens again, read the logs of Ray, or leave out --ray",
        )

    def begin(self, order: Order) -> None:
        """Put the order into the cluster."""
        self._ask("begin", order)

    def slots(self) -> int:
        """Workers that fit on the machines that are there now."""
        return self._ask("slots")

    def start(self, share: Share) -> None:
        """Start a worker on a machine that Ray chooses."""
        self._ask("start", share)

    def answers(self, seconds: float) -> list[tuple[Share, Answer]]:
        """The answers of the workers that have ended."""
        return self._ask("answers", seconds)

    def stop(self, share: Share) -> None:
        """End the worker of a share. Nothing of a lost cluster runs."""
        with suppress(WorkerLost):
            self._ask("stop", share)


def serve(fd: int) -> None:
    """Join a cluster, and do what `WatchedWorkers` asks at the other end of this pipe, until it is closed."""
    from multiprocessing.connection import Connection

    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the driver's; a handler is not inherited, SIG_IGN would be
    pipe = Connection(fd)
    number, _, (options,) = pipe.recv()
    with suppress(EOFError, BrokenPipeError):
        try:
            with RayWorkers.connect(options) as workers:
                pipe.send((number, None, os.environ.get("RAY_AUTH_TOKEN", "")))
                while True:
                    _answer_one(pipe, workers)
        except (ParameterError, WorkerLost) as error:
            pipe.send((number, portable(error), None))


def _answer_one(pipe: Connection, workers: RayWorkers) -> None:
    number, name, arguments = pipe.recv()
    try:
        value = getattr(workers, name)(*arguments)
    except Exception as error:
        pipe.send((number, portable(error), None))
    else:
        pipe.send((number, None, value))


def _join(ray: Any, address: str, stack: ExitStack) -> None:
    """Join a cluster, or start one that nobody else can reach. stack: what is undone after the cluster has ended."""
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == AUTO:
        try:
            ray.init(AUTO, **settings)
            return
        except ConnectionError:  # there is none
            pass
    elif address != LOCAL:
        ray.init(address, **settings)
        return
    # Ray listens on all interfaces and lets everybody read its files, unless it is told that its clusters have one machine;
    # and it leaves its token in the home folder. The folder around its own is ours: it makes its own readable.
    constants: Any = import_module("ray._private.ray_constants")
    enabled = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    undo = stack.enter_context(ExitStack())
    undo.callback(setattr, constants, "ENABLE_RAY_CLUSTER", enabled)
    variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    if (register := "RAY_worker_register_timeout_seconds") not in os.environ:
        variables[register] = str(REGISTER_SECONDS)
    if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        variables["RAY_AUTH_TOKEN"] = _token()
        undo.callback(_set, "RAY_AUTH_MODE", None)  # Ray sets it
    for name, value in variables.items():
        undo.callback(_set, name, os.environ.get(name))
        os.environ[name] = value
    # Its sockets are in it, and their paths are 107 bytes long at most.
    folder = tempfile.mkdtemp(prefix="ws-", dir=os.environ.get("RAY_TMPDIR") or ("/tmp" if os.name == "posix" else None))
    undo.callback(shutil.rmtree, folder, ignore_errors=True)
    undo.callback(ray.shutdown)  # before its folder goes
    ray.init(LOCAL, include_dashboard=False, _temp_dir=os.path.join(folder, "ray"), **settings)  # noqa: PTH118


@cache
def _token() -> str:
    """What the processes of a cluster of ours know each other by. Ray reads it once in a process."""
    token = secrets.token_hex(32)
    know(token)
    return token


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _do(order: Order, share: Share) -> bytes:
    """`do`, in a process of Ray's."""
    return do(order, share)
