"""What the command sets for its whole process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FOUR_THREADS = """
import contextlib, ctypes, sys, threading
from weightsmith.cli import main
if sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        main()
together, kept = threading.Barrier(4), []

def allocate():
    together.wait()
    kept.append(bytearray(10_000))
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ctypes.CDLL(None).malloc_stats()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_threads_share_one_arena_of_memory() -> None:
    def arenas(*one: str) -> int:
        ran = subprocess.run([sys.executable, "-c", FOUR_THREADS, *one], capture_output=True, text=True, check=True)
        return ran.stderr.count("Arena ")

    assert arenas() > 1
    assert arenas("--version") == 1
