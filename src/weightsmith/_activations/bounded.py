"""Scripts that run what a hostile file asks for, in a process whose memory and CPU time the system bounds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Self

from weightsmith._base.errors import undoing

_RUNNER = Path(__file__).with_name("bounded_script.py")
_COMPLAINT_BYTES = 1 << 20
_KEPT = (
    *("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "HOME", "TMPDIR", "TEMP"),
    *("LANG", "LC_ALL", "SYSTEMROOT"),
)
"""Variables that a script gets. Tokens and keys are not among them."""


class BoundedScript:
    """A context manager: a script of this folder at work. It is killed at the end of the block.

    out  its stdout

    `bounded_script.py` says what a script looks like. On Windows nothing bounds it.
    """

    out: IO[bytes]

    def __init__(self, script: str, doing: str, max_bytes: int, seconds: int, stdin: IO[str] | IO[bytes], **env: str) -> None:
        """
        script     its name, without `.py`
        doing      what takes so much time, for messages
        max_bytes  of memory, besides the code of its libraries
        seconds    of CPU time
        stdin      its stdin
        env        added to `_KEPT`
        """
        self._doing, self._max_bytes, self._seconds = doing, max_bytes, seconds
        self._command = [sys.executable, "-P", str(_RUNNER), str(_RUNNER.with_name(f"{script}.py"))]
        self._command += [str(max_bytes), str(seconds)]
        self._given, self._env = stdin, {name: os.environ[name] for name in _KEPT if name in os.environ} | env

    def __enter__(self) -> Self:
        self._complaint = tempfile.TemporaryFile()
        stdout = subprocess.PIPE
        with undoing(self._complaint.close):
            self._process = subprocess.Popen(
                self._command, stdin=self._given, stdout=stdout, stderr=self._complaint, env=self._env
            )
        assert self._process.stdout is not None
        self.out = self._process.stdout
        return self

    def failure(self) -> str:
        """Why it ended, for a message; "" if it did all of its work. Waits for its end."""
        status = self._process.wait()
        if not status:
            return ""
        if status == -signal.SIGXCPU:
            return f"{self._doing} takes more than {self._seconds} seconds"
        self._complaint.seek(0)
        lines = self._complaint.read(_COMPLAINT_BYTES).decode(errors="replace").strip().splitlines()
        why = lines[-1][:500] if lines else f"its process ended with status {status}"
        if status == -signal.SIGABRT:  # a library of C++ without memory: "bad_alloc", or only that a thread could not begin
            return f"{self._doing} was aborted, with a limit of {self._max_bytes >> 20:,} MiB of memory: {why}"
        return why

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        with self._process, self._complaint:
            pass
