"""Where bytes that were fetched wait until they are read: slots in a nameless file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def spool_folder() -> Path:
    """Where the spool's file is: huggingface_hub's cache, which is on a large disk, else where temporary files are."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir())
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


class Spool:
    """Slots of equal size in a file without a name, which is gone when the process ends, however it ends. Thread-safe.

    The descriptor is closed when nothing refers to the spool: a thread that is late must never write to another file that
    has taken its number.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        with tempfile.TemporaryFile(prefix="weightsmith-", dir=spool_folder()) as file:
            self._fd = os.dup(file.fileno())

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def write(self, slot: int, offset: int, data: bytes) -> None:
        """Write bytes into a slot. Raises OSError: the disk is full."""
        view, at = memoryview(data), slot * self._slot_bytes + offset
        while view:
            n = os.pwrite(self._fd, view, at)
            view, at = view[n:], at + n

    def read(self, slot: int, offset: int, out: memoryview) -> None:
        """Fill `out` from a slot. Raises OSError."""
        done = 0
        while done < len(out):
            n = os.preadv(self._fd, [out[done:]], slot * self._slot_bytes + offset + done)
            if n == 0:
                raise OSError("the spool is shorter than what was written to it")
            done += n
