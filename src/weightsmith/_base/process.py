"""What glibc's malloc does with freed memory. Other C libraries are left alone.

By default it gives each thread an arena that keeps what its threads have freed, blocks of up to 32 MiB too, and never shrinks
in the middle: 0.2 GB where matrices of 46 MB are decomposed, and 2 MB more for each layer that is calibrated.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import select
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from weightsmith._base.errors import WeightsmithError

LARGE_BYTES = 4 << 20
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h


def limit_malloc_arenas() -> None:
    """Have all threads share an arena from now on. For a process that is ours alone: for programs that use weightsmith as a
    library it may be slower.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@cache
def return_large_blocks() -> None:
    """Have freed blocks of `LARGE_BYTES` and more returned to the system at once."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def allow_nesting(stages: int) -> None:
    """Raise Python's limit of nested calls for so many stages, each of which may be in the next one.

    One takes two calls while it is planned and closed. A limit that is too high does no harm: these calls take no C stack.
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + 4 * stages))


def return_freed() -> None:
    """Return what is free now to the system. Takes milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# ---- stdout and stderr where they cannot be written: closed, on a full disk, or pipes without a reader


class ResultLost(WeightsmithError):
    """stdout does not take the result. no_reader: it is a pipe, and its reader has closed it."""

    def __init__(self, error: OSError) -> None:
        self.no_reader = error.errno == errno.EPIPE
        why = {errno.EPIPE: "its reader has closed it", errno.EBADF: "it is closed"}.get(error.errno or 0, error.strerror)
        super().__init__(f"the result cannot be printed: {why}", where="stdout")


class _Raw(io.FileIO):
    """A standard stream below its buffer. Nothing is written after the first failure, which `failed` is told."""

    def __init__(self, number: int, failed: Callable[[OSError], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._failed = failed
        self._gone = False

    def write(self, data: Any) -> int:
        while not self._gone:
            try:
                written = super().write(data)
            except OSError as error:
                self._gone = True
                self._failed(error)
                break
            if written is not None:
                return written
            select.select([], [self], [])  # another program has made the terminal or the pipe non-blocking
        return memoryview(data).nbytes


def _lost(error: OSError) -> None:
    raise ResultLost(error)


def replace_streams() -> None:
    """Replace stdout and stderr by streams that behave as this module says; those of a caller (a test) stay.

    A number of a closed stream would be given to the next file that is opened, and what a library writes to stderr would
    end in a weight file. /dev/null takes these numbers.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):  # 1: so that a write fails
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free number
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(sys.stdout, 1, _lost)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(sys.stderr, 2, lambda error: None)


def _stream(before: TextIO | None, number: int, failed: Callable[[OSError], None]) -> TextIO:
    line_by_line = number == 2 or bool(before and (before.line_buffering or getattr(before, "write_through", False)))
    encoding = before.encoding if before is not None else "utf-8"
    buffer = io.BufferedWriter(_Raw(number, failed))
    return io.TextIOWrapper(buffer, encoding=encoding, errors="backslashreplace", line_buffering=line_by_line)


def is_running(process: int) -> bool:
    """Whether a process of this machine is there, by its number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that large
        return False
    except PermissionError:  # another user's
        pass
    return True


def memory_bytes() -> tuple[int | None, int | None]:
    """Bytes of the machine, and those that are free or can be freed; None where the system does not tell."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None, None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return total, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return total, None
