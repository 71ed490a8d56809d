"""What jobs remember from one merge to the next of the same inputs, see `Job.recall`. Large arrays are kept on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

LARGE_BYTES = 64 << 10
"""Arrays of at least so many bytes are kept on disk."""

DISK_SHARE = 0.5
"""The most of the free space of the disk that they take."""


class JobMemory:
    """A memory for the jobs of each tensor and its inputs."""

    def __init__(self, folder: Path | None = None, most: int | None = None) -> None:
        """
        folder  where large arrays are kept, in a file without a name, which goes with the process; None: they are not kept
        most    large arrays of one tensor, at least 1; the one that was not used for longest makes room. None: any number
        """
        self._arrays = _ArrayFile(folder)
        self._most = most
        self._memories = dict[object, _Memory]()

    def of(self, key: object) -> MutableMapping[object, Any]:
        """The memory of a tensor and its inputs."""
        return self._memories.setdefault(key, _Memory(self._arrays, self._most))


class _Memory(MutableMapping[object, Any]):
    """A dictionary whose large arrays are on disk. An array that does not fit there is forgotten: it is computed again."""

    def __init__(self, arrays: _ArrayFile, most: int | None) -> None:
        self._arrays, self._most = arrays, most
        self._values = dict[object, Any]()

    def __getitem__(self, key: object) -> Any:
        value = self._values[key]
        if not isinstance(value, _Place):
            return value
        self._values[key] = self._values.pop(key)  # the last in order is the one that was used last
        try:
            return self._arrays.read(value)
        except OSError:
            raise KeyError(key) from None

    def __setitem__(self, key: object, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.nbytes >= LARGE_BYTES:
            place = self._arrays.write(value, self._freed())
            if place is None:
                return
            value = place
        self._values[key] = value

    def _freed(self) -> _Place | None:
        """Forget the array that was not used for longest, if there is no room for one more. Where it was."""
        places = [key for key, value in self._values.items() if isinstance(value, _Place)]
        return self._values.pop(places[0]) if self._most is not None and len(places) >= self._most else None

    def __delitem__(self, key: object) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[object]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Place:
    """Where an array is in the file."""

    def __init__(self, offset: int, like: npt.NDArray[Any]) -> None:
        self.offset, self.dtype, self.shape, self.nbytes = offset, like.dtype, like.shape, like.nbytes


class _ArrayFile:
    """Arrays one after the other in a file without a name."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._end = 0
        self._limit = 0
        self._lock = threading.Lock()

    def write(self, array: npt.NDArray[Any], freed: _Place | None = None) -> _Place | None:
        """Write an array where one of as many bytes was that is forgotten, or append it.

        None if there is no folder, or the disk has no room for it.
        """
        with self._lock:
            try:
                if self._folder is None:
                    return None
                if self._file is None:
                    self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
                    weakref.finalize(self, self._file.close)
                    self._limit = int(DISK_SHARE * shutil.disk_usage(self._folder).free)
                offset = freed.offset if freed is not None and freed.nbytes == array.nbytes else self._end
                if offset + array.nbytes > self._limit:
                    return None
                data, done = _bytes(np.ascontiguousarray(array)), 0
                while done < array.nbytes:
                    done += os.pwrite(self._file.fileno(), data[done:], offset + done)
            except OSError:
                return None
            self._end = max(self._end, offset + array.nbytes)
            return _Place(offset, array)

    def read(self, place: _Place) -> npt.NDArray[Any]:
        """An array, as a new one. Raises OSError if the disk does not give it back."""
        assert self._file is not None
        array, done = np.empty(place.shape, place.dtype), 0
        data = _bytes(array)
        while done < array.nbytes:
            got = os.preadv(self._file.fileno(), [data[done:]], place.offset + done)
            if not got:
                raise OSError("the file ends early")
            done += got
        return array


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
