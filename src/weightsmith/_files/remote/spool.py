"""Where bytes wait that were fetched, or are to be uploaded: slots in a nameless file."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

from weightsmith._base.errors import NoSpace, StoreError
from weightsmith._base.files import FULL, read_all, write_all
from weightsmith._files.remote.environment import check_hub


def spool_folder() -> Path:
    """Where the spool's file is: huggingface_hub's cache, which is on a large disk, else where temporary files are."""
    check_hub()
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir())
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


class Spool:
    """Slots of equal size in a file without a name, which is gone when the process ends, however it ends. Thread-safe.

    slots  that were taken, also those that are free again: the size of the file

    The descriptor is closed when nothing refers to the spool: a thread that is late must never write to another file that
    has taken its number.
    """

    def __init__(self, slot_bytes: int, folder: Path) -> None:
        """Raises StoreError if no file can be made in the folder."""
        self.slots = 0
        self._slot_bytes = slot_bytes
        self._folder = folder
        self._free: list[int] = []
        self._lock = threading.Lock()
        try:
            with tempfile.TemporaryFile(prefix="weightsmith-", dir=folder) as file:
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise self._failure(error) from error

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    @property
    def has_free(self) -> bool:
        """A slot can be taken without the file getting larger."""
        return bool(self._free)

    def take(self) -> int:
        """A slot, with any contents."""
        with self._lock:
            if self._free:
                return self._free.pop()
            self.slots += 1
            return self.slots - 1

    def give_back(self, slot: int) -> None:
        """Nothing needs the contents of a slot any more."""
        with self._lock:
            self._free.append(slot)

    def write(self, slot: int, offset: int, data: bytes | memoryview) -> None:
        """Write bytes into a slot. Raises StoreError, NoSpace if the disk is full."""
        try:
            write_all(self._fd, memoryview(data), slot * self._slot_bytes + offset)
        except OSError as error:
            raise self._failure(error) from error

    def read(self, slot: int, offset: int, out: memoryview) -> None:
        """Fill `out` from a slot. Raises StoreError."""
        try:
            n = read_all(self._fd, out, slot * self._slot_bytes + offset)
        except OSError as error:
            raise self._failure(error) from error
        if n < len(out):
            what = "the temporary cache file is shorter than what was written to it"
            raise StoreError(what, where=str(self._folder), fix="run again")

    def _failure(self, error: OSError) -> StoreError:
        what = f"cannot use the temporary cache file for streamed data: {error.strerror or error}"
        fix = "free space there, or name another folder in HF_HUB_CACHE"
        return (NoSpace if error.errno in FULL else StoreError)(what, where=str(self._folder), fix=fix)
