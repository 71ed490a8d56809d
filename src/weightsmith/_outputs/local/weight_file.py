"""One weight file under construction. Writes bypass the page cache where memory, offset and file system allow it.

The output is written once and not read again, so putting it into the page cache would cost a copy, and memory that the
inputs need more. `O_DIRECT` sends whole pages from the caller's buffer to the disk; the bytes before the first page boundary
and after the last one go through the page cache. No page is written both ways.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

from weightsmith._base.files import write_all
from weightsmith._outputs.local import disk

PAGE_BYTES = 4096
"""A multiple of every disk's block size, and of the alignment that O_DIRECT requires of offsets and memory."""


class WeightFile:
    """An open weight file. Thread-safe for different byte ranges; `close` may be called twice.

    fd  for reading, and for writes of any size
    """

    def __init__(self, path: Path) -> None:
        """Open or create it. Raises OSError, also for a symbolic link; StoreError for a pipe, socket or device."""
        self._path = path
        self.fd = disk.open_own(path, os.O_RDWR)
        self._direct = -1

    def open_direct(self) -> None:
        """Bypass the page cache from now on, if the file system can and a descriptor is available."""
        if hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                self._direct = os.open(self._path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, view: memoryview, offset: int) -> None:
        """Write a 1-D view of bytes at `offset`; at full speed when its address and `offset` are equal modulo 4,096."""
        head, middle = self._split(view, offset)
        if middle:
            end = head + middle
            write_all(self.fd, view[:head], offset)
            self._write_pages(view[head:end], offset + head)
            write_all(self.fd, view[end:], offset + end)
        else:
            write_all(self.fd, view, offset)

    def _split(self, view: memoryview, offset: int) -> tuple[int, int]:
        """Bytes before the first page boundary, and bytes in whole pages after it that can be written directly."""
        head = -offset % PAGE_BYTES
        if self._direct < 0 or view.readonly or view.nbytes < head + PAGE_BYTES:
            return 0, 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if (address - offset) % PAGE_BYTES:
            return 0, 0
        return head, (view.nbytes - head) // PAGE_BYTES * PAGE_BYTES

    def _write_pages(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < view.nbytes and done % PAGE_BYTES == 0:
            try:
                done += os.pwrite(self._direct, view[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break  # the file system accepts the flag but not the write
        write_all(self.fd, view[done:], offset + done)

    def close(self) -> None:
        """Close both descriptors."""
        fds = self._direct, self.fd
        self.fd = self._direct = -1  # first, so that an interrupted close is not repeated
        for fd in fds:
            if fd >= 0:
                os.close(fd)
