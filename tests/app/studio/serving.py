"""The studio's command, started for a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
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

SECONDS = 60.0


@dataclass
class Studio:
    """A server that runs. address: with its token; log: what it printed."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.address.partition("//")[2].rpartition(":")[2].partition("/")[0])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def start(
    root: Path,
    *flags: str,
    folders: tuple[str, ...] = ("models",),
    out: str = "out",
    port: int = 0,
    hub: Mapping[str, str] | None = None,
) -> Studio:
    """Start the command in a folder, and wait until it has printed its address. hub: the environment of a Hub; None: none."""
    log = root / f"log-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "weightsmith", "studio", *folders, "--out", out, "--port", str(port), *flags]
    command += ["--no-hub"] if hub is None else []
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=root, env=environment(**({"HF_HUB_OFFLINE": "1"} if hub is None else hub)), stdout=file, stderr=file
        )
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        said = log.read_text()
        if "Press Ctrl-C" in said:
            address = next(word for word in said.split() if word.startswith("http://"))
            return Studio(process, address.replace("0.0.0.0", "127.0.0.1"), log)
        assert process.poll() is None, said
        time.sleep(0.05)
    process.kill()
    raise AssertionError(log.read_text())


@contextmanager
def serving(root: Path, *flags: str, **options: Any) -> Iterator[Studio]:
    """A studio of some folders, until the block ends."""
    found = start(root, *flags, **options)
    try:
        yield found
    finally:
        stop(found)


def stop(found: Studio) -> int:
    """End it as Ctrl-C does. Its exit status."""
    if found.process.poll() is None:
        found.process.send_signal(signal.SIGINT)
        try:
            found.process.wait(20)
        except subprocess.TimeoutExpired:
            os.kill(found.process.pid, signal.SIGKILL)
            found.process.wait()
            raise
    return found.process.returncode


def asked(url: str, body: object = None, **headers: str) -> tuple[int, str]:
    """The status and text of an answer. body: sent as JSON; bytes: as they are."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} | headers
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=given), timeout=20) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
