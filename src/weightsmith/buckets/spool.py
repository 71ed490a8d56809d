"""Parts that are being filled, in one temporary file without a name, which the system removes in any case.

Tiles of a part arrive in any order. The file has a slot for each part that is open; a slot is used again once its part is
uploaded, so the file is as large as what is open at a time, mostly in the page cache.
"""

from __future__ import annotations

import tempfile
import threading

from weightsmith.errors import NoSpace, StoreError
from weightsmith.store import disk


class Spool:
    """Slots of equal size. Thread-safe for different slots, or parts of one; `close` may be called twice."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._folder = tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(prefix="weightsmith-", dir=self._folder, buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        self._free: list[int] = []
        self.slots = 0
        self._lock = threading.Lock()

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

    def write(self, slot: int, start: int, view: memoryview) -> None:
        """Write into a slot. Raises NoSpace."""
        try:
            disk.write_all(self._file.fileno(), view, slot * self._slot_bytes + start)
        except OSError as error:
            raise self._failed(error) from error

    def read(self, slot: int, nbytes: int) -> bytearray:
        """The first bytes of a slot."""
        data = bytearray(nbytes)
        if disk.read_into(self._file.fileno(), memoryview(data), slot * self._slot_bytes) != nbytes:
            raise StoreError("bytes of the temporary file are gone", where=self._folder, fix="run again")
        return data

    def _failed(self, error: OSError) -> StoreError:
        fix = "free space there, or name another folder in TMPDIR"
        if error.errno in disk.FULL:
            return NoSpace("no space for the parts that wait to be uploaded", where=self._folder, fix=fix)
        return StoreError(f"parts that wait to be uploaded cannot be stored: {error.strerror}", where=self._folder, fix=fix)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
