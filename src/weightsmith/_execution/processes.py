"""Several processes of this machine do the parts of one run, because the threads of one process share the interpreter's lock.

A process holds the lock for a part of each tile, so it feeds only so many threads (`--processes`, docs/scale.md). Each process
does shares as on a cluster (`cluster.share_out`), which gives the same bytes. All end with this process, however it ends.
"""

from __future__ import annotations

import mmap
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any

from weightsmith._base.errors import NoSpace, WorkerLost
from weightsmith._base.options import named
from weightsmith._engine.resources import processors
from weightsmith._execution.cluster import Answer, Lost, Order, Share, do
from weightsmith._execution.options import RunOptions

LAST_WORDS_SECONDS = 1.0
"""How long a process that has closed its pipe may take to end: an exception is shown, and threads are joined, after that."""
PARENT_SECONDS = 1.0
"""Between two looks whether the first process is still there."""
_SERVE = (
    "import os, sys; parent = os.getppid(); sys.path[:] = {path!r}; "  # before imports, which take a while
    "from weightsmith._execution.processes import serve; serve({fd}, {order}, parent)"
)


@dataclass(slots=True)
class _Process:
    """A process, what it is asked through, and what it writes to stderr."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    errors: IO[bytes]

    def end(self, seconds: float = 0.0) -> str:
        """End it, if it has not ended: why it had. seconds: to wait for it first, if it is about to end."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        status = self.process.poll()
        self.pipe.close()
        self.process.kill()
        self.process.wait()
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - (1 << 14)))
        lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        self.errors.close()
        status = self.process.returncode if status is None else status
        what = f"signal {-status} ended it" if status < 0 else f"it ended with status {status}"
        return f"{what}: {lines[-1][:200]}" if lines else what


class LocalWorkers:
    """Processes of this machine, which share the threads of a run. A context manager: all end with it.

    >>> with LocalWorkers(2, RunOptions(threads=5)) as workers:
    ...     workers.slots(), workers.threads
    (2, [3, 2])
    """

    setting, several_machines = "processes", False
    advice = "if the machine is short of memory, use fewer --processes"

    def __init__(self, n: int, options: RunOptions) -> None:
        """Start none yet."""
        self._all_threads = total = options.threads or processors()
        self.threads = [total // n + (i < total % n) for i in range(n)]
        self._order: IO[bytes] | None = None
        self._free = [*range(n)]
        self._running: dict[Share, int] = {}
        self._processes: dict[int, _Process] = {}

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.end()
        self._processes.clear()
        if self._order is not None:
            self._order.close()

    def begin(self, order: Order) -> None:
        """What processes get when they are started. Those that have another order end."""
        for i in list(self._processes):
            self._processes.pop(i).end()
        if self._order is not None:
            self._order.close()
        # A file: a pipe holds 64 kB, so this process would wait until each new one has imported all that it needs to read it.
        content = pickle.dumps(order)
        try:
            self._order = tempfile.TemporaryFile()
            self._order.write(content)
            self._order.flush()
        except OSError as error:
            what = f"the plan of the processes cannot be written: {error.strerror or error}"
            details = (f"needed     {len(content):,} bytes",)
            fix = "free space there, or set TMPDIR to a folder on another disk"
            raise NoSpace(what, where=tempfile.gettempdir(), details=details, fix=fix) from error

    def slots(self) -> int:
        """Processes."""
        return len(self.threads)

    def start(self, share: Share) -> None:
        """Have a process that has nothing to do, or a new one, do a share."""
        place = self._running[share] = self._free.pop(0)
        if place not in self._processes:
            self._processes[place] = self._new()
        try:
            self._processes[place].pipe.send((share, self.threads_of(share)))
        except OSError:  # it has ended: `answers` finds out
            pass

    def threads_of(self, share: Share) -> int:
        """The threads of a running share. Whoever computes products for the others has all of them: they wait for it."""
        alone = share.part is None and not share.helper
        return self._all_threads if alone else self.threads[self._running[share]]

    def _new(self) -> _Process:
        assert self._order is not None
        order = self._order.fileno()
        with ExitStack() as closing:
            try:
                errors: IO[bytes] = closing.enter_context(tempfile.TemporaryFile())
                pipe, theirs = map(closing.enter_context, Pipe())
                process = subprocess.Popen(
                    [sys.executable, "-c", _SERVE.format(path=sys.path, fd=theirs.fileno(), order=order)],
                    pass_fds=[theirs.fileno(), order],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            except OSError as error:
                what = f"a process cannot be started: {error.strerror or error}"
                fix = "use fewer --processes, or raise the limits of this machine"
                raise WorkerLost(what, where=named(self.setting), fix=fix) from error
            closing.pop_all()
        theirs.close()
        return _Process(process, pipe, errors)

    def answers(self, seconds: float) -> list[tuple[Share, Answer]]:
        """The answers of the processes that have ended a share, or themselves."""
        if not self._running:
            time.sleep(seconds)
            return []
        shares = {self._processes[place].pipe: share for share, place in self._running.items()}
        ready = [pipe for pipe in wait(list(shares), seconds) if isinstance(pipe, Connection)]
        return [(shares[pipe], self._answer(shares[pipe], pipe)) for pipe in ready]

    def _answer(self, share: Share, pipe: Connection) -> Answer:
        place = self._running.pop(share)
        self._free.append(place)
        try:
            answer: Answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return Lost(self._processes.pop(place).end(LAST_WORDS_SECONDS))
        return answer

    def stop(self, share: Share) -> None:
        """End the process of a share, if it still runs."""
        place = self._running.pop(share, None)
        if place is not None:
            self._free.append(place)
            if (process := self._processes.pop(place, None)) is not None:  # or it could not be started
                process.end()


def serve(fd: int, order_fd: int, parent: int) -> None:
    """Do the shares that come through a pipe, each with its number of threads.

    The process ends with the pipe, and with `parent`, also while it does a share.

    order_fd  of a file with the pickled order, whose position all processes share
    """
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the first process's, which ends the others
    pipe = Connection(fd)
    with mmap.mmap(order_fd, 0, access=mmap.ACCESS_READ) as data:
        order = pickle.loads(data)
    os.close(order_fd)
    asked: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_listen, args=(pipe, asked, parent), daemon=True).start()
    while True:
        share, threads = asked.get()
        pipe.send_bytes(do(replace(order, options=replace(order.options, threads=threads)), share))


def _listen(pipe: Connection, asked: queue.Queue[Any], parent: int) -> None:
    """Take in shares while one is done. The process ends with its parent, the one that asks, however that ends."""
    try:
        while True:
            if pipe.poll(PARENT_SECONDS):
                asked.put(pipe.recv())
            elif os.getppid() != parent:  # a process that it has forked may hold the other end of the pipe open
                os._exit(0)
    except (EOFError, OSError):
        os._exit(0)
