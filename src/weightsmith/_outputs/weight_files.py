"""Weight files under construction. Writes bypass the page cache where memory, offset and file system allow it.

The output is written once and not read again, so putting it into the page cache would cost a copy, and memory that the
inputs need more. `O_DIRECT` sends whole pages from the caller's buffer to the disk; the bytes before the first page boundary
and after the last one go through the page cache. No page is written both ways.

`StagedFiles` are all there at a time. Of `StreamedFiles` a few are: each is created when the first byte of one of its tensors
is written, put where the output goes once all of them are finished, and then removed. The engine finishes tensors in the order
of the files, so few exist at a time: those that are being filled, and at most `UPLOADS` more. A new one waits for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from weightsmith._base.errors import NOTHING_WRITTEN, NoSpace, StoreError
from weightsmith._base.files import FULL, read_all, write_all
from weightsmith._files.containers import Layout, ShardLayout
from weightsmith._outputs import disk
from weightsmith._outputs.checksum import StoredBytes, grain_bytes, read_at, reread
from weightsmith._outputs.journal import FileState
from weightsmith.abc.output import Finished, Progress

PAGE_BYTES = 4096
"""A multiple of every disk's block size, and of the alignment that O_DIRECT requires of offsets and memory."""
UPLOADS = 2
"""Files that are uploaded at a time, by one thread each."""
FILLED = 2
"""Files that are filled at a time, as a rule: the tiles of a few tensors in a row are in flight."""


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


class StagedFiles:
    """All weight files of a layout, open. Thread-safe for different tensors, or parts of one; `close` may be called twice.

    put  the files that are where the output goes, by name, with what `Target.put` says of them
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        """Open or create the files in `folder`. Raises as `WeightFile` does."""
        self.layout = layout
        self.put: dict[str, Any] = {}
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
        """The names of the files that are in the folder at the end."""
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
                if _is_reserved(file.fd, shard):  # writing to it would change its time: see `unchanged`
                    continue
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

    def start(self, finished: Collection[str]) -> None:
        """Writing begins. finished: tensors that an earlier run has finished, and that are as it wrote them."""

    def finish(self, name: str) -> None:
        """All bytes of a tensor are written, and it is in the journal."""

    def reopen(self, names: Collection[str]) -> set[str]:
        """These finished tensors are written again: the names of files that were put, and are made again as a whole."""
        return set()

    def lost(self, files: Collection[str]) -> None:
        """These files were put, and are gone."""

    def adopt(self, files: Mapping[str, Any]) -> None:
        """Another process has put these files."""

    def drain(self, progress: Progress | None) -> None:
        """Wait until every finished file is put. Raises what failed. progress(bytes of these files, bytes in all)."""

    def abandon(self) -> None:
        """Wake threads that wait in `write` or `location`: the run has failed."""

    def synced(self, finished: Container[str]) -> dict[str, FileState]:
        """Make the bytes of complete files durable: their states. finished: names of tensors."""
        states = {}
        for file, shard in zip(self._files, self.layout.shards, strict=True):
            if shard.tensors and all(spec.name in finished for spec in shard.tensors):
                disk.sync_data(file.fd)
                states[shard.name] = _state(file.fd)
        return states

    def unchanged(self, states: Mapping[str, FileState]) -> set[str]:
        """The names of the tensors of files that are as they were when they were `synced`."""
        files = zip(self._files, self.layout.shards, strict=True)
        return {spec.name for file, shard in files if states.get(shard.name) == _state(file.fd) for spec in shard.tensors}

    def checksums(self, names: Iterable[str], threads: int, progress: Progress | None) -> dict[str, str]:
        """The checksums of these tensors as they are on disk; names that the layout does not have are left out."""
        asked = set(names)
        stored = [
            StoredBytes(
                spec.name, partial(read_at, file.fd), self.layout.places[spec.name].offset, spec.nbytes, grain_bytes(spec)
            )
            for file, shard in zip(self._files, self.layout.shards, strict=True)
            for spec in shard.tensors
            if spec.name in asked
        ]
        return reread(stored, threads=threads, progress=progress) if stored else {}

    def problems(self) -> list[str]:
        """Files whose size or header is not that of the layout."""
        lines = []
        for file, shard in zip(self._files, self.layout.shards, strict=True):
            size = os.fstat(file.fd).st_size
            if size != shard.nbytes:
                lines.append(f"{shard.name} has {size:,} bytes, the layout {shard.nbytes:,}")
            header = bytearray(len(shard.header))
            read_all(file.fd, memoryview(header), 0)
            if header != shard.header:
                lines.append(f"the header of {shard.name} was overwritten")
        return lines

    def sync(self) -> None:
        """Make the bytes durable, and the names of files in subfolders."""
        for file in self._files:
            disk.sync_data(file.fd)
        for inner in {parent for name in self.names for parent in Path(name).parents if parent.name}:
            disk.fsync_folder(self._folder / inner)

    def settle(self) -> None:
        """Wait for what is being put. Nothing else is put afterwards."""

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.pop().close()


def _state(fd: int) -> FileState:
    about = os.fstat(fd)
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino


def _is_reserved(fd: int, shard: ShardLayout) -> bool:
    """Whether a file has its size, its blocks and its header."""
    about = os.fstat(fd)
    if about.st_size != shard.nbytes or (about.st_blocks * 512 < shard.nbytes and not disk.is_in_memory(fd)):
        return False
    header = bytearray(len(shard.header))
    read_all(fd, memoryview(header), 0)
    return header == shard.header


class StreamedFiles(StagedFiles):
    """Weight files that are put one by one. Thread-safe, as `StagedFiles`; `start` is called before anything is written."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        finished: Mapping[str, Finished],
        put: Mapping[str, Any],
        send: Callable[[str, Path], Any],
        building: Collection[str] | None = None,
        holds_back: bool = False,
    ) -> None:
        """Change nothing on disk.

        finished    tensors that an earlier run has finished; only a file all of whose tensors are is taken for put
        put         files that it has put
        send        put a file under its name; what it returns is in the journal
        building    the tensors that this process builds; None: all
        holds_back  nothing is put before `drain`
        """
        self.layout = layout
        self._folder, self._send, self._holds_back = folder, send, holds_back
        self._checksums = {name: done.checksum for name, done in finished.items()}
        self.put = {
            shard.name: put[shard.name]
            for shard in layout.shards
            if shard.name in put and all(spec.name in finished for spec in shard.tensors)
        }
        self._whole = building is None
        self._built = {
            number
            for number, shard in enumerate(layout.shards)
            if building is None or any(spec.name in building for spec in shard.tensors)
        }
        self._open: dict[int, WeightFile] = {}
        self._numbers = {shard.name: number for number, shard in enumerate(layout.shards)}
        self._missing = [{spec.name for spec in shard.tensors} for shard in layout.shards]
        self._waiting = 0
        self._error: BaseException | None = None
        self._closed = self._abandoned = self._offered = False
        self._changed = threading.Condition()
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def names(self) -> frozenset[str]:
        """None of them is in the folder at the end."""
        return frozenset()

    # before the first byte

    def reserve(self, space: int, other_bytes: int, more_bytes: int, folder: Path) -> None:
        """Open the files that an earlier run has left, remove those that it has put, and check the space for the others.

        Raises NoSpace unless the largest files that may exist at a time fit.
        """
        held = 0
        for number, shard in enumerate(self.layout.shards):
            path = self._folder / shard.name
            if shard.name in self.put:
                path.unlink(missing_ok=True)
            elif path.exists():
                held += self._create(number)
        shards = [self.layout.shards[number] for number in self._built]
        sizes = sorted((shard.nbytes for shard in shards if shard.name not in self.put), reverse=True)
        needed = sum(sizes if self._holds_back else sizes[: UPLOADS + FILLED]) + other_bytes + more_bytes
        free = disk.available_bytes(folder)
        if needed - held > free:
            what, fix = "no space for the weight files until they are uploaded", "make the files smaller: --max-shard-size"
            if self._holds_back:
                what = "no space for the weight files, which are uploaded at the end, because this output replaces another one"
                fix = "choose another address"
            raise NoSpace(
                what,
                where=str(folder.parent),
                details=(f"needed     {needed - held:,} bytes", f"available  {free:,} bytes"),
                fix=f"free space there, keep them on another disk with --staging FOLDER (staging), or {fix}",
            )
        disk.reserve(space, other_bytes)

    def _create(self, number: int) -> int:
        """Open a file at its full size, with its header: the bytes that it takes."""
        shard = self.layout.shards[number]
        path = self._folder / shard.name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = WeightFile(path)
        try:
            disk.reserve(file.fd, shard.nbytes)
            file.write(memoryview(shard.header), 0)
        except OSError as error:
            file.close()
            if error.errno in FULL:
                raise disk.no_space(self._folder.parent.parent, shard.nbytes, state="", cause=error) from error
            raise
        self._open[number] = file
        return shard.nbytes

    def checksums(self, names: Iterable[str], threads: int, progress: Progress | None) -> dict[str, str]:
        """The checksums of these tensors: as they are on disk, or as they were put; others are left out."""
        asked = {name for name in names if name in self.layout.places}
        shards = self.layout.shards
        put = {name: self._checksums[name] for name in asked if shards[self.layout.places[name].shard].name in self.put}
        stored = [
            StoredBytes(
                spec.name, partial(read_at, file.fd), self.layout.places[spec.name].offset, spec.nbytes, grain_bytes(spec)
            )
            for number, file in self._open.items()
            for spec in shards[number].tensors
            if spec.name in asked
        ]
        return put | (reread(stored, threads=threads, progress=progress) if stored else {})

    def start(self, finished: Collection[str]) -> None:
        """Begin to upload."""
        for number in range(len(self._missing)):
            self._missing[number] -= {*finished}
        for i in range(UPLOADS):
            self._threads.append(threading.Thread(target=self._work, name=f"weightsmith-upload-{i}", daemon=True))
            self._threads[-1].start()

    def reopen(self, names: Collection[str]) -> set[str]:
        """These finished tensors are written again: the names of files that were put, and are made again as a whole."""
        numbers = {name: self.layout.places[name].shard for name in names if name in self.layout.places}
        files = {self.layout.shards[number].name for number in numbers.values()} & self.put.keys()
        for name, number in numbers.items():
            self._missing[number].add(name)
        self.lost(files)
        return files

    def lost(self, files: Collection[str]) -> None:
        """These files were put, and are gone."""
        with self._changed:
            for name in files:
                self.put.pop(name, None)
                number = self._numbers[name]
                self._missing[number] = {spec.name for spec in self.layout.shards[number].tensors}

    def adopt(self, files: Mapping[str, Any]) -> None:
        """Another process has put these files."""
        with self._changed:
            for name, value in files.items():
                number = self._numbers[name]
                self.put[name], self._missing[number] = value, set()
                if (file := self._open.pop(number, None)) is not None:
                    file.close()
                    (self._folder / name).unlink(missing_ok=True)

    # writing

    def location(self, name: str) -> tuple[int, int]:
        """Open file and byte offset of a tensor. Waits while too many files wait for their upload."""
        return self._file(name).fd, self.layout.places[name].offset

    def write(self, name: str, start_byte: int, view: memoryview) -> None:
        """Write a 1-D view of bytes into a tensor."""
        self._file(name).write(view, self.layout.places[name].offset + start_byte)

    def _file(self, name: str) -> WeightFile:
        number = self.layout.places[name].shard
        with self._changed:
            self._check()
            self._offer_all()
            while number not in self._open:
                if self._waiting < UPLOADS:
                    self._create(number)
                else:
                    self._changed.wait()
                    self._check()
            return self._open[number]

    def finish(self, name: str) -> None:
        """All bytes of a tensor are written. A file whose tensors are all finished is put."""
        number = self.layout.places[name].shard
        with self._changed:  # one thread finds that none is missing
            if name in self._missing[number]:
                self._missing[number].remove(name)
                if self._offered:
                    self._offer(number)

    def _offer_all(self) -> None:
        """Queue the finished files of an earlier run, once."""
        if not self._offered and not self._holds_back:
            self._offered = True
            for number in range(len(self._missing)):
                self._offer(number)

    def _offer(self, number: int) -> None:
        """Queue a file whose tensors are all finished."""
        name, tensors = self.layout.shards[number].name, self.layout.shards[number].tensors
        if self._missing[number] or name in self.put or (not tensors and not self._whole):
            return
        if number not in self._open:
            self._create(number)
        self._waiting += 1
        self._queue.put(number)

    # uploads

    def _work(self) -> None:
        """A thread that uploads."""
        while (number := self._queue.get()) is not None:
            try:
                if not self._closed and self._error is None:
                    self._upload(number)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
            finally:
                with self._changed:
                    self._waiting -= 1
                    self._changed.notify_all()

    def _upload(self, number: int) -> None:
        shard, file = self.layout.shards[number], self._open[number]
        path = self._folder / shard.name
        header = bytearray(len(shard.header))
        read_all(file.fd, memoryview(header), 0)
        if header != shard.header or path.stat().st_size != shard.nbytes:
            raise StoreError("the file was changed by someone else", where=str(path), fix="remove it, and run again")
        value = self._send(shard.name, path)
        with self._changed:
            if self._closed:
                return
            self.put[shard.name] = value
            self._open.pop(number).close()
        path.unlink(missing_ok=True)

    def _check(self) -> None:
        """Raise what has failed in a thread that uploads; ValueError once it is closed or abandoned."""
        if self._closed or self._abandoned:
            raise ValueError(f"{self._folder}: this output is closed, or its run has failed")
        if self._error is not None:
            raise self._error

    def drain(self, progress: Progress | None) -> None:
        """Wait until every finished file is put. Raises what failed. progress(bytes of these files, bytes in all)."""
        sizes = {shard.name: shard.nbytes for shard in self.layout.shards}
        with self._changed:
            self._holds_back = False
            self._offer_all()
            while self._waiting and self._error is None:
                if progress is not None:
                    progress(sum(sizes[name] for name in self.put), sum(sizes.values()))
                self._changed.wait(0.2)  # Ctrl-C is noticed between two waits
            self._check()

    def problems(self) -> list[str]:
        """Files that are not uploaded."""
        return [f"{shard.name} is not uploaded" for shard in self.layout.shards if shard.name not in self.put]

    def sync(self) -> None:
        """Nothing: the files are where they go."""

    def settle(self) -> None:
        """Wait for what is being put. Nothing else is put afterwards."""
        threads = self._threads
        self.close()
        for thread in threads:
            thread.join()

    def abandon(self) -> None:
        """Wake threads that wait in `write` or `location`: they raise ValueError."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the files, and end the threads after their current request. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            files, self._open = self._open, {}
        for _ in self._threads:
            self._queue.put(None)
        self._threads = []
        for file in files.values():
            file.close()
