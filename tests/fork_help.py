"""A copy of this process in place of a new one: with its imports, and an environment, streams and folder of its own.

A new process takes a second of processor time and more for its imports. What a copy imports, this process imports afterwards,
so that the next copies have it. A copy has the thread alone that made it; huggingface_hub reads its environment again.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.cli_help import Ran


class Forked:
    """A copy of this process that calls a function and ends: with status 0, that of a SystemExit, or 70 after an error."""

    def __init__(self, work: Callable[[], object], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        self._out, self._err, self._imported = (tempfile.TemporaryFile() for _ in range(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of servers, which the copy does not have
            self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                code = self._call(work, os.environ.copy() if env is None else env, cwd)
            finally:  # whatever happens, no copy goes on with the tests
                os._exit(code)

    def _call(self, work: Callable[[], object], env: Mapping[str, str], cwd: Path | None) -> int:
        """The status with which the copy ends."""
        known, code = {*sys.modules}, 0
        self._prepare(env, cwd)
        try:
            work()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 70
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(self._imported.fileno(), " ".join(sys.modules.keys() - known).encode())
        return code

    def _prepare(self, env: Mapping[str, str], cwd: Path | None) -> None:
        for number, (name, file) in enumerate((("stdout", self._out), ("stderr", self._err)), 1):
            os.dup2(file.fileno(), number)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))
        warnings.resetwarnings()  # those of pytest
        warnings.simplefilter("ignore", DeprecationWarning)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        if "huggingface_hub" in sys.modules:
            from huggingface_hub import close_session, constants

            from weightsmith._files import hub

            importlib.reload(constants)
            close_session()
            hub._silent.clear()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def ended(self) -> bool:
        """It has ended; `wait` has not been called."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> Ran:
        """Its status, as `subprocess` gives it, and what it wrote."""
        _, status = os.waitpid(self.pid, 0)
        texts = []
        for file in (self._out, self._err, self._imported):
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        for name in texts.pop().split():
            if name.startswith(
                ("weightsmith.", "huggingface_hub.", "httpx", "httpcore", "numba.", "typer.", "starlette", "uvicorn")
            ):
                importlib.import_module(name)
        return Ran(os.waitstatus_to_exitcode(status), *texts)


def forked(work: Callable[[], object], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """What a copy of this process leaves that calls a function."""
    return Forked(work, env, cwd).wait()


def forked_code(code: str, *arguments: Any) -> Ran:
    """What `python -c code …` leaves in a copy of this process."""

    def work() -> None:
        sys.argv = ["-c", *map(str, arguments)]
        exec(code, {"__name__": "__main__"})

    return forked(work)


def started_cli(*arguments: Any, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Forked:
    """A copy of this process that runs `weightsmith …`."""

    def work() -> None:
        from weightsmith._app.cli import main

        sys.argv = ["weightsmith", *map(str, arguments)]
        main()

    return Forked(work, env, cwd)


def forked_cli(*arguments: Any, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """What `weightsmith …` leaves in a copy of this process."""
    return started_cli(*arguments, env=env, cwd=cwd).wait()
