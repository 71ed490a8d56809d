"""Run a command and measure it whole; put the page cache into a known state before.

This module imports nothing large: Linux counts the memory of the process that starts a child into the child's peak.
"""

from __future__ import annotations

import ctypes
import filecmp
import mmap
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CacheState = Literal["warm", "cold"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a command.

    wall_seconds    from its start to its end
    cpu_seconds     user and system time of it and its children
    peak_rss_bytes  the most memory it had resident
    output          what it printed
    """

    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    output: str


def run(command: Sequence[str], log: Path) -> Measured:
    """Run `command` with its output in `log`; raises SystemExit if it fails."""
    with log.open("wb") as stream:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    output = log.read_text(encoding="utf-8", errors="replace")
    if process.returncode:
        raise SystemExit(f"{output}\nstatus {process.returncode} from: {' '.join(command)}")
    return Measured(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, output)


def prepare_cache(files: Sequence[Path], state: CacheState) -> None:
    """Write back everything that is dirty, then bring `files` into the page cache, or out of it."""
    os.sync()
    buffer = bytearray(4 << 20)
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            if state == "cold":
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.readv(fd, [buffer]):
                    pass
        finally:
            os.close(fd)


def in_turn(commands: Mapping[str, Sequence[str]], runs: int, inputs: Sequence[Path], log: Path) -> dict[str, list[Measured]]:
    """Run the commands one after another, so many times; `inputs` are in the page cache before each."""
    done: dict[str, list[Measured]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            prepare_cache(inputs, "warm")
            done[name].append(run(command, log))
    return done


def check_same(folder: Path, other: Path) -> None:
    """Raise SystemExit if a weight file of the one differs in the other."""
    for file in folder.glob("*.safetensors"):
        if not filecmp.cmp(file, other / file.name, shallow=False):
            raise SystemExit(f"{other / file.name} differs from {file}")


def cached_share(files: Sequence[Path]) -> float:
    """The share of the bytes of `files` that is in the page cache, asked of the kernel (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = resident = 0
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), size, flags=mmap.MAP_PRIVATE) as view:
            count = -(-size // mmap.PAGESIZE)
            present = (ctypes.c_ubyte * count)()
            # A private mapping is writable, so ctypes can take its address; nothing is written.
            address = ctypes.c_void_p(ctypes.addressof(anchor := ctypes.c_char.from_buffer(view)))
            if libc.mincore(address, ctypes.c_size_t(size), present):
                raise OSError(ctypes.get_errno(), f"mincore {file}")
            resident += sum(byte & 1 for byte in present)
            pages += count
            del anchor  # or the map cannot be closed
    return resident / pages
