"""What is asked of the C library, and what comes of it."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import pytest

from weightsmith._base import process as heap

pytestmark = pytest.mark.process

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
FOUR_THREADS = """
import contextlib, ctypes, sys, threading
from weightsmith._app.cli import main
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


@pytest.mark.slow
@on_glibc
def test_threads_of_the_command_share_limit_malloc_arenas() -> None:
    def arenas(*one: str) -> int:
        ran = subprocess.run([sys.executable, "-c", FOUR_THREADS, *one], capture_output=True, text=True, check=True)
        return ran.stderr.count("Arena ")

    assert arenas() > 1
    assert arenas("--version") == 1


PINNED = """
from pathlib import Path
from weightsmith._base.process import return_freed

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])

blocks = [bytearray(100_000) for _ in range(1000)]
kept = blocks[::20]
del blocks
before = resident()
return_freed()
print(resident() / before)
"""


@pytest.mark.slow
@on_glibc
def test_freed_blocks_between_others_are_returned() -> None:
    ran = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 0.5


def test_large_blocks_are_asked_to_be_returned_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, parameter: int, value: int) -> int:
            calls.append((parameter, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    unwrap(heap.return_large_blocks)()
    assert calls == [(-3, heap.LARGE_BYTES)]


@pytest.mark.parametrize("missing", [OSError, AttributeError])
@pytest.mark.parametrize("ask", [heap.limit_malloc_arenas, unwrap(heap.return_large_blocks), heap.return_freed])
def test_nothing_is_asked_of_other_c_libraries(
    missing: type[Exception], ask: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(name: Any) -> Any:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", none)
    ask()
