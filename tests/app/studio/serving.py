"""The studio's command, started for a test."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli_help import environment
from tests.fork_help import Forked

SECONDS = 180.0


@dataclass
class Studio:
    """A server that runs. address: with its token; log: what it printed."""

    process: Forked
    address: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.address.partition("//")[2].rpartition(":")[2].partition("/")[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start(
    root: Path,
    *flags: str,
    folders: tuple[str, ...] = ("models",),
    out: str = "out",
    port: int = 0,
    hub: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Studio:
    """Start the command in a folder, and wait until it has printed its address.

    hub: the environment of a Hub; None: none. fresh: in a new interpreter, not in a copy of this process.
    """
    log = root / f"log-{time.monotonic_ns()}"
    arguments = ["studio", *folders, "--out", out, "--port", str(port), *flags, *(["--no-hub"] if hub is None else [])]

    def work() -> None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        if fresh:
            os.execv(sys.executable, [sys.executable, "-m", "weightsmith", *arguments])
        from weightsmith._app.cli import main

        sys.argv = ["weightsmith", *arguments]
        main()

    process = Forked(work, env=environment(**({"HF_HUB_OFFLINE": "1"} if hub is None else hub)), cwd=root)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        said = log.read_text() if log.exists() else ""
        if "Press Ctrl-C" in said:
            address = next(word for word in said.split() if word.startswith("http://"))
            return Studio(process, address.replace("0.0.0.0", "127.0.0.1"), log)
        assert not process.ended(), said + process.wait().err
        time.sleep(0.05)
    process.kill()
    process.wait()
    raise AssertionError(log.read_text())


@contextmanager
def serving(root: Path, *flags: str, **options: Any) -> Iterator[Studio]:
    """A studio of some folders, until the block ends."""
    studio = start(root, *flags, **options)
    try:
        yield studio
    finally:
        stop(studio)


def stop(studio: Studio) -> int:
    """End it as Ctrl-C does. Its exit status."""
    studio.process.kill(signal.SIGINT)
    end = time.monotonic() + 120
    while not studio.process.ended():
        if time.monotonic() > end:
            studio.kill()
            raise AssertionError(f"Ctrl-C does not end the studio:\n{studio.log.read_text()}")
        time.sleep(0.01)
    return studio.process.wait().code


def asked(url: str, body: object = None, **headers: str) -> tuple[int, str]:
    """The status and text of an answer. body: sent as JSON; bytes: as they are."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    sent_headers = {"Content-Type": "application/json"} | headers
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=sent_headers), timeout=20) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
