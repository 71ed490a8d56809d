"""Weight files under construction. Writes bypass the page cache where memory, offset and file system allow it.

The output is written once and not read again, so putting it into the page cache would cost a copy, and memory that the
inputs need more. `O_DIRECT` sends whole pages from the caller's buffer to the disk; the bytes before the first page boundary
and after the last one go through the page cache. No page is written both ways.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._base.errors import NOTHING_WRITTEN
from weightsmith._base.files import FULL, read_all, write_all
from weightsmith._files.containers import Layout
from weightsmith._outputs.checksum import grain_bytes
from weightsmith._outputs.local import disk
from weightsmith._outputs.reread import Stored, read_at, reread
from weightsmith.abc.output import Progress

if TYPE_CHECKING:
    from weightsmith._base.files import Extent

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


class Weights:
    """All open weight files of a layout. Thread-safe for different tensors, or parts of one; `close` may be called twice."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        """Open or create the files in `folder`. Raises as `WeightFile` does."""
        self.layout = layout
        self._folder = folder
        self._files: list[WeightFile] = []
        disk.allow_open_files(2 * len(layout.shards))
        try:
            for shard in layout.shards:
                path = folder / shard.name
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files.append(WeightFile(path))
            for file in self._files:  # after all that are needed: descriptors may run short
                file.open_direct()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> frozenset[str]:
        """The names of all files."""
        return frozenset(shard.name for shard in self.layout.shards)

    def reserve(self, space: int, other_bytes: int, more_bytes: int, folder: Path) -> None:
        """Reserve the files at their full size, and write their headers. In memory (tmpfs) only the free space is compared.

        space       open file that reserves `other_bytes` for the files that are not weights
        more_bytes  needed besides
        folder      the staging folder, for messages

        Raises NoSpace.
        """
        held = sum(os.fstat(fd).st_blocks * 512 for fd in (space, *(file.fd for file in self._files)))
        needed = self.layout.total_bytes + more_bytes + other_bytes - held
        state = f"{NOTHING_WRITTEN[:-1]}; the space reserved so far is released."
        if held:
            state = f"Finished tensors are kept in {folder}; run again to resume."
        if needed > disk.available_bytes(folder):
            raise disk.no_space(folder.parent, needed, state=state)
        try:
            for file, shard in zip(self._files, self.layout.shards, strict=True):
                if disk.is_in_memory(file.fd):
                    os.ftruncate(file.fd, shard.nbytes)  # the threads fill it, each page once
                else:
                    disk.reserve(file.fd, shard.nbytes)
                file.write(memoryview(shard.header), 0)
            disk.reserve(space, other_bytes)
        except OSError as error:
            if error.errno in FULL:
                raise disk.no_space(folder.parent, needed, state=state, cause=error) from error
            raise

    def location(self, name: str) -> tuple[int, int]:
        """Open file and byte offset of a tensor."""
        place = self.layout.places[name]
        return self._files[place.shard].fd, place.offset

    def write(self, name: str, start_byte: int, view: memoryview) -> None:
        """Write a 1-D view of bytes into a tensor. Raises OSError."""
        place = self.layout.places[name]
        self._files[place.shard].write(view, place.offset + start_byte)

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """Nothing is copied."""

    def is_taken(self, name: str) -> bool:
        """False: all bytes may be written again."""
        return False

    def finish(self, name: str) -> None:
        """Nothing is left to do."""

    def drain(self, progress: Progress | None) -> None:
        """Nothing waits."""

    def abandon(self) -> None:
        """No thread waits."""

    def checksums(self, names: Iterable[str], threads: int, progress: Progress | None) -> dict[str, str]:
        """The checksums of these tensors as they are on disk; names that the layout does not have are left out."""
        wanted = set(names)
        stored = [
            Stored(spec.name, partial(read_at, file.fd), self.layout.places[spec.name].offset, spec.nbytes, grain_bytes(spec))
            for file, shard in zip(self._files, self.layout.shards, strict=True)
            for spec in shard.tensors
            if spec.name in wanted
        ]
        return reread(stored, threads=threads, progress=progress) if stored else {}

    def problems(self) -> list[str]:
        """Files whose size or header is not that of the layout."""
        found = []
        for file, shard in zip(self._files, self.layout.shards, strict=True):
            size = os.fstat(file.fd).st_size
            if size != shard.nbytes:
                found.append(f"{shard.name} has {size:,} bytes, the layout {shard.nbytes:,}")
            header = bytearray(len(shard.header))
            read_all(file.fd, memoryview(header), 0)
            if header != shard.header:
                found.append(f"the header of {shard.name} was overwritten")
        return found

    def sync(self) -> None:
        """Make the bytes durable, and the names of files in subfolders."""
        for file in self._files:
            disk.sync_data(file.fd)
        for inner in {parent for name in self.names for parent in Path(name).parents if parent.name}:
            disk.fsync_folder(self._folder / inner)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.pop().close()
