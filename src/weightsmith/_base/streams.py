"""stdout and stderr where they cannot be written: closed, on a full disk, or pipes without a reader.

What is said about the work goes to stderr, and is dropped then: it never stops the work. A result goes to stdout, and one that
cannot be printed raises `ResultLost`, once; whatever follows it is dropped.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

from weightsmith._base.errors import WeightsmithError


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
