"""Weight files between their first byte and their upload.

A file is created when the first byte of one of its tensors is written, uploaded once all of them are finished, and then
removed. The engine finishes tensors in the order of the files, so few of them exist at a time: those that are being filled,
and at most `UPLOADS` more. A new one waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from weightsmith._base.errors import NoSpace, StoreError
from weightsmith._base.files import FULL, Extent, read_all
from weightsmith._files.containers import Layout
from weightsmith._outputs.checksum import grain_bytes
from weightsmith._outputs.hub.repository import Content
from weightsmith._outputs.local import disk
from weightsmith._outputs.local.weight_file import WeightFile
from weightsmith._outputs.reread import Stored, read_at, reread
from weightsmith.abc.output import Finished, Progress

UPLOADS = 2
"""Files that are uploaded at a time, by one thread each."""
FILLED = 2
"""Files that are filled at a time, as a rule: the tiles of a few tensors in a row are in flight."""


class StreamedUploads:
    """The weight files of an output on the Hub, and their uploads: see `local.backend.FolderWeights`. Thread-safe.

    uploaded  of each uploaded file by name, what it holds
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        finished: Mapping[str, Finished],
        uploaded: Mapping[str, Content],
        upload: Callable[[Path, str], Content],
    ) -> None:
        """Change nothing on disk.

        folder    of the files
        finished  tensors that an earlier run has finished; only a file all of whose tensors are is taken for uploaded
        uploaded  files that it has uploaded
        upload    a file, under its name; what it returns is in the journal
        """
        self.layout = layout
        self._folder = folder
        self._upload_file = upload
        self._checksums = {name: done.checksum for name, done in finished.items()}
        self.uploaded: dict[str, Content] = {
            shard.name: uploaded[shard.name]
            for shard in layout.shards
            if shard.name in uploaded
            and uploaded[shard.name].nbytes == shard.nbytes
            and all(spec.name in finished for spec in shard.tensors)
        }
        self._files: dict[int, WeightFile] = {}
        self._missing = [{spec.name for spec in shard.tensors} for shard in layout.shards]
        self._taken: frozenset[str] = frozenset()
        self._waiting = 0
        self._error: BaseException | None = None
        self._closed = self._abandoned = False
        self._changed = threading.Condition()
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def names(self) -> frozenset[str]:
        """None of them is in the folder at the end."""
        return frozenset()

    def reserve(self, space: int, other_bytes: int, more_bytes: int, folder: Path) -> None:
        """Open the files that an earlier run has left, remove those that it has uploaded, and check the space for the others.

        space       open file that reserves `other_bytes` for the files that are not weights
        more_bytes  needed besides

        Raises NoSpace unless the largest files that may exist at a time fit.
        """
        held = 0
        for number, shard in enumerate(self.layout.shards):
            path = self._folder / shard.name
            if shard.name in self.uploaded:
                path.unlink(missing_ok=True)
            elif path.exists():
                held += self._create(number, shard.nbytes)
        sizes = sorted((shard.nbytes for shard in self.layout.shards if shard.name not in self.uploaded), reverse=True)
        needed = sum(sizes[: UPLOADS + FILLED]) + other_bytes + more_bytes
        free = disk.available_bytes(folder)
        if needed - held > free:
            raise NoSpace(
                "no space for the weight files until they are uploaded",
                where=str(folder.parent),
                details=(f"needed     {needed - held:,} bytes", f"available  {free:,} bytes"),
                fix="free space there, run in a folder on another disk, or make the files smaller: --max-shard-size "
                "(max_shard_bytes)",
            )
        disk.reserve(space, other_bytes)

    def _create(self, number: int, nbytes: int) -> int:
        """Open a file at its full size, with its header: the bytes that it takes already."""
        shard = self.layout.shards[number]
        path = self._folder / shard.name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = WeightFile(path)
        try:
            disk.reserve(file.fd, nbytes)
            file.write(memoryview(shard.header), 0)
        except OSError as error:
            file.close()
            if error.errno in FULL:
                raise disk.no_space(self._folder.parent.parent, nbytes, state="", cause=error) from error
            raise
        self._files[number] = file
        return nbytes

    def location(self, name: str) -> tuple[int, int] | None:
        """Open file and byte offset of a tensor; None if `is_taken`. Waits while too many files wait for their upload."""
        file = self._file(name)
        return None if file is None else (file.fd, self.layout.places[name].offset)

    def is_taken(self, name: str) -> bool:
        """An earlier run has finished the tensor. If it is computed again all the same, its bytes are ignored."""
        return name in self._taken

    def _file(self, name: str) -> WeightFile | None:
        if name in self._taken:
            return None
        number = self.layout.places[name].shard
        with self._changed:
            self._check()
            while number not in self._files:
                if self._waiting < UPLOADS:
                    self._create(number, self.layout.shards[number].nbytes)
                else:
                    self._changed.wait()
                    self._check()
            return self._files[number]

    def write(self, name: str, start_byte: int, view: memoryview) -> None:
        """Write a 1-D view of bytes into a tensor."""
        file = self._file(name)
        if file is not None:
            file.write(view, self.layout.places[name].offset + start_byte)

    def equal(self, name: str, start_byte: int, extent: Extent) -> None:
        """Nothing is copied: the Hub copies whole files alone."""

    def checksums(self, names: Iterable[str], threads: int, progress: Progress | None) -> dict[str, str]:
        """The checksums of these tensors: as they are on disk, or as they were uploaded; others are left out."""
        wanted = {name for name in names if name in self.layout.places}
        shards = self.layout.shards
        found = {name: self._checksums[name] for name in wanted if shards[self.layout.places[name].shard].name in self.uploaded}
        stored = [
            Stored(spec.name, partial(read_at, file.fd), self.layout.places[spec.name].offset, spec.nbytes, grain_bytes(spec))
            for number, file in self._files.items()
            for spec in shards[number].tensors
            if spec.name in wanted
        ]
        return found | (reread(stored, threads=threads, progress=progress) if stored else {})

    # uploads

    def start(self, finished: Collection[str]) -> None:
        """Begin to upload. finished: tensors that an earlier run has finished, and that are as it wrote them."""
        self._taken = frozenset(finished)
        for i in range(UPLOADS):
            self._threads.append(threading.Thread(target=self._work, name=f"weightsmith-upload-{i}", daemon=True))
            self._threads[-1].start()
        for number, shard in enumerate(self.layout.shards):
            self._missing[number] -= self._taken
            if not shard.tensors and shard.name not in self.uploaded and number not in self._files:
                self._create(number, shard.nbytes)
            self._offer(number)

    def finish(self, name: str) -> None:
        """All bytes of a tensor are written. A file whose tensors are all finished is uploaded."""
        number = self.layout.places[name].shard
        with self._changed:  # one thread finds that none is missing
            if name in self._missing[number]:
                self._missing[number].remove(name)
                self._offer(number)

    def _offer(self, number: int) -> None:
        """Queue a file whose tensors are all finished."""
        with self._changed:
            if self._missing[number] or self.layout.shards[number].name in self.uploaded:
                return
            self._waiting += 1
            self._queue.put(number)

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
        shard, file = self.layout.shards[number], self._files[number]
        path = self._folder / shard.name
        header = bytearray(len(shard.header))
        read_all(file.fd, memoryview(header), 0)
        if header != shard.header or path.stat().st_size != shard.nbytes:
            raise StoreError("the file was changed by someone else", where=str(path), fix="remove it, and run again")
        content = self._upload_file(path, shard.name)
        with self._changed:
            if self._closed:
                return
            self.uploaded[shard.name] = content
            self._files.pop(number).close()
        path.unlink(missing_ok=True)

    def _check(self) -> None:
        """Raise what has failed in a thread that uploads; ValueError once it is closed or abandoned."""
        if self._closed or self._abandoned:
            raise ValueError(f"{self._folder}: this output is closed, or its run has failed")
        if self._error is not None:
            raise self._error

    def drain(self, progress: Progress | None) -> None:
        """Wait until every finished file is uploaded. Raises what failed. progress(bytes of uploaded files, bytes in all)."""
        total = sum(shard.nbytes for shard in self.layout.shards)
        with self._changed:
            while self._waiting and self._error is None:
                if progress is not None:
                    progress(sum(content.nbytes for content in self.uploaded.values()), total)
                self._changed.wait(0.2)  # Ctrl-C is noticed between two waits
            self._check()

    def problems(self) -> list[str]:
        """Files that are not uploaded."""
        return [f"{shard.name} is not uploaded" for shard in self.layout.shards if shard.name not in self.uploaded]

    def sync(self) -> None:
        """Nothing: the files are on the Hub."""

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
            files, self._files = self._files, {}
        for _ in self._threads:
            self._queue.put(None)
        self._threads = []
        for file in files.values():
            file.close()
