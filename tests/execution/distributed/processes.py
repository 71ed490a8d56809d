"""Workers that are processes with a home, temporary files and a current folder of their own, as on machines of their own."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import weightsmith
from tests.execution.distributed.threads import Answering
from weightsmith._execution.cluster import Answer, Lost, Order, Share

PART_BYTES = 20_000
WORK = """
import os, pickle, sys, time
from weightsmith._outputs.bucket import BucketTarget
from weightsmith._execution.cluster import do
put = BucketTarget.put
def slow(self, name, file):
    time.sleep(float(os.environ["SLOW"]))
    return put(self, name, file)
BucketTarget.put = slow
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
try:
    while True:
        order, share = pickle.load(sys.stdin.buffer)
        answers.write(do(order, share))
        answers.flush()
except (EOFError, BrokenPipeError):  # the driver was killed
    os._exit(0)
"""


def environment(home: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a machine with this home; variables: what names the store."""
    kernels = os.environ.get("NUMBA_CACHE_DIR") or str(Path.home() / ".cache" / "weightsmith")  # compiling takes a minute
    paths = [str(Path(weightsmith.__file__).parents[1]), str(Path(__file__).parents[3])]
    base_variables = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "HF_HOME": str(home / "hf"), "PATH": os.environ["PATH"]}
    return {**base_variables, "NUMBA_CACHE_DIR": kernels, "PYTHONPATH": os.pathsep.join(paths), "SLOW": "0", **variables}


class Processes(Answering):
    """See `distributed.work.Workers`. A process does one share after another, and those of others of the same environment.

    To start one takes 2 s, most of which is imports.

    root     beside the processes' folders
    given    of their environment
    started  shares, in order
    lost     shares of processes that ended without an answer
    """

    spare: ClassVar[list[tuple[Mapping[str, str], subprocess.Popen[bytes]]]] = []

    def __init__(self, slots: int, root: Path, variables: Mapping[str, str]) -> None:
        super().__init__(slots)
        self.lost: list[Share] = []
        self._root, self.variables = root, {**variables}
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: list[subprocess.Popen[bytes]] = []
        self.running: dict[Share, subprocess.Popen[bytes]] = {}

    def begin(self, order: Order) -> None:
        """The driver's folder is on no other machine."""
        self._order = replace(order, folder="/there/is/no/such/folder")

    def start(self, share: Share) -> None:
        self.started.append(share)
        process = self._idle.pop() if self._idle else self._new()
        self.running[share] = process
        threading.Thread(target=self._ask, args=(process, share), daemon=True).start()

    def _new(self) -> subprocess.Popen[bytes]:
        for i, (variables, process) in enumerate(self.spare):
            if variables == self.variables:
                self._all.append(self.spare.pop(i)[1])
                return process
        # Beside the folder of the test, which is removed while another test uses the process.
        home = self._root.parent / f"machine-{uuid.uuid4().hex}"
        (home / "tmp").mkdir(parents=True)
        process = subprocess.Popen(
            [sys.executable, "-c", WORK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(home, self.variables),
            cwd=home,
        )
        self._all.append(process)
        return process

    def _ask(self, process: subprocess.Popen[bytes], share: Share) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        answer: Answer
        try:
            pickle.dump((self._order, share), process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
            self._idle.append(process)
        except (EOFError, OSError):
            self.lost.append(share)
            answer = Lost("its process has ended")
        if self.running.pop(share, None) is process:
            self._answers.put((share, answer))

    def stop(self, share: Share) -> None:
        process = self.running.pop(share, None)
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End all processes but those that have nothing to do, which others may use."""
        for process in self._all:
            if process in self._idle:
                self.spare.append(({**self.variables}, process))
            else:
                end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


@atexit.register
def end_spare() -> None:
    for _, process in Processes.spare:
        end(process)
