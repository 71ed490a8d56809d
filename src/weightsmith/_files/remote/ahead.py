"""Remote bytes that a plan will read, fetched before they are read.

The bytes that a plan reads are known before it runs. They are cut into blocks of several MB, each one run of bytes of one file,
whatever tensors it holds. Some connections fetch the blocks in the order in which the engine will need them, into a spool on
disk; the engine's threads read from there. A block that is needed again much later stays in the spool while there is room, and
is fetched again if there was none. Nothing is fetched that the plan does not read.
"""

from __future__ import annotations

import bisect
import heapq
import os
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weightsmith._base.errors import CheckpointError, NoSpace, StoreError
from weightsmith._base.files import FULL, Extent, read_all, write_all
from weightsmith._files.remote import STREAM_CACHE_BYTES
from weightsmith._files.remote.addresses import check_hub
from weightsmith._files.remote.folder import RemoteFile
from weightsmith._files.remote.retries import Stopped, fetch, fetch_into

if TYPE_CHECKING:
    from types import TracebackType


# ---- Where bytes wait that were fetched, or are to be uploaded: slots in a nameless file


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


BLOCK_BYTES = 8 << 20
CONNECTIONS = 16
AHEAD_BLOCKS = 32
"""Blocks that are fetched before they are read."""
MIN_SLOTS = 8

Visit = Sequence[Extent]
"""What is read in one pass over one matrix."""


@dataclass(slots=True, eq=False)
class FetchedBlock:
    """A run of bytes of a file.

    places  the visits that read it, by their numbers in the order of fetching; those to come
    dues    bytes that each of them reads of it
    read    bytes that were read of the first of `dues`
    slot    in the spool; -1: none
    state   "" (elsewhere), "wanted", "coming" or "here"
    pins    threads that read it, or wait for it
    kept    it waits for a visit that is far off
    error   why it cannot be fetched
    """

    file: RemoteFile
    start: int
    end: int
    places: deque[int] = field(default_factory=deque)
    dues: deque[int] = field(default_factory=deque)
    read: int = 0
    slot: int = -1
    state: str = ""
    pins: int = 0
    kept: bool = False
    error: Exception | None = None


class Blocks:
    """The bytes that visits read, in blocks that do not overlap.

    order  of fetching; a block is in it once for each visit
    files  that are read
    """

    def __init__(self, visits: Sequence[Visit]) -> None:
        self.order: list[FetchedBlock] = []
        self.files = list(dict.fromkeys(_remote(extent) for visit in visits for extent in visit))
        self._blocks: dict[tuple[str, str, int], list[FetchedBlock]] = {}
        self._starts: dict[tuple[str, str, int], list[int]] = {}
        self._cut(visits)
        for visit in visits:
            dues: dict[FetchedBlock, int] = {}
            for extent in visit:
                start, end = extent.offset, extent.offset + extent.nbytes
                for block in self.of(_remote(extent), start, end):
                    dues[block] = dues.get(block, 0) + min(end, block.end) - max(start, block.start)
            for block, due in dues.items():
                block.places.append(len(self.order))
                block.dues.append(due)
                self.order.append(block)

    def of(self, file: RemoteFile, start: int, end: int) -> list[FetchedBlock]:
        """The blocks that have some of these bytes, in order."""
        blocks, starts = self._blocks.get(file.key, []), self._starts.get(file.key, [])
        first, last = max(0, bisect.bisect_right(starts, start) - 1), bisect.bisect_left(starts, end)
        return [block for block in blocks[first:last] if block.end > start]

    def _cut(self, visits: Sequence[Visit]) -> None:
        files = {file.key: file for file in self.files}
        spans: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
        for visit in visits:
            for extent in visit:
                if extent.nbytes:
                    spans.setdefault(_remote(extent).key, []).append((extent.offset, extent.offset + extent.nbytes))
        for key, spans_of_file in spans.items():
            runs: list[list[int]] = []
            for start, end in sorted(set(spans_of_file)):
                if runs and start <= runs[-1][1]:
                    runs[-1][1] = max(runs[-1][1], end)
                else:
                    runs.append([start, end])
            cuts = [(at, min(at + BLOCK_BYTES, end)) for start, end in runs for at in range(start, end, BLOCK_BYTES)]
            self._blocks[key] = [FetchedBlock(files[key], start, end) for start, end in cuts]
            self._starts[key] = [start for start, _ in cuts]


def _remote(extent: Extent) -> RemoteFile:
    assert isinstance(extent.file, RemoteFile)
    return extent.file


def _slots(cache_bytes: int) -> int:
    return max(MIN_SLOTS, cache_bytes // BLOCK_BYTES)


def _ahead(slots: int) -> int:
    """Blocks that may be fetched and not yet read; so many slots hold no block that is kept."""
    return min(AHEAD_BLOCKS, slots // 2)


@dataclass(frozen=True, slots=True)
class TransferEstimate:
    """Transfers over the network for a plan, without headers.

    needed_bytes   bytes of all files, each counted once
    network_bytes  bytes transferred: more than needed if bytes are read again that the disk cache no longer has
    requests       requests for runs of bytes
    passes         maximum number of times that a byte is read
    """

    needed_bytes: int
    network_bytes: int
    requests: int
    passes: int


def estimate(visits: Sequence[Visit], cache_bytes: int = STREAM_CACHE_BYTES) -> TransferEstimate:
    """What travels for some visits. Cost: a few microseconds for each visit of a block."""
    blocks, ahead = Blocks(visits), _ahead(_slots(cache_bytes))
    room, kept = _slots(cache_bytes) - ahead, set[FetchedBlock]()
    needed = network = requests = passes = 0
    for place, block in enumerate(blocks.order):
        nbytes = block.end - block.start
        if not block.read:
            passes = max(passes, -(-sum(block.dues) // nbytes))
            needed += nbytes
            block.read = nbytes
        if block.state == "":
            network += nbytes
            requests += 1
        block.places.popleft()
        far = bool(block.places) and block.places[0] - place > ahead
        if far and len(kept) < room:
            kept.add(block)
        block.state = "here" if block.places and (not far or block in kept) else ""
        if not block.state:
            kept.discard(block)
    return TransferEstimate(needed, network, requests, passes)


class ReadAhead:
    """Fetches what a run will read. A context manager; its threads and its spool end with it.

    fetched_bytes  so far
    """

    def __init__(self, visits: Sequence[Visit], cache_bytes: int = STREAM_CACHE_BYTES) -> None:
        """visits: what will be read, in order."""
        self.fetched_bytes = 0
        self._blocks = Blocks(visits)
        self._slots = _slots(cache_bytes)
        self._condition = threading.Condition()
        self._stop = threading.Event()
        self._here: dict[FetchedBlock, None] = {}
        self._kept = 0
        self._pointer = 0  # into the order of fetching
        self._late: list[int] = []  # places before the pointer whose blocks were dropped
        self._frontier = -1  # the last place that was read
        self._urgent: deque[FetchedBlock] = deque()
        self._files: list[RemoteFile] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ReadAhead:
        self._files = [file for file in self._blocks.files if file.ahead is None]
        if self._files:
            self._spool = Spool(BLOCK_BYTES, spool_folder())
            for file in self._files:
                file.ahead = self
            n_threads = min(CONNECTIONS, len(self._blocks.order), self._slots)
            self._threads = [threading.Thread(target=self._work, name=f"fetch-{i}", daemon=True) for i in range(n_threads)]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        for file in self._files:
            file.ahead = None
        for thread in self._threads if kind is None else ():  # after an error one may still wait for a server
            thread.join()

    def stop(self) -> None:
        """Wake all threads that wait, and fetch nothing more."""
        self._stop.set()
        with self._condition:
            self._condition.notify_all()

    def read_into(self, file: RemoteFile, offset: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file, once they are here. Raises CheckpointError."""
        end, at = offset + len(out), offset
        blocks = self._blocks.of(file, offset, end)
        with self._condition:
            for block in blocks[1:]:  # all at once
                self._want(block)
        for block in blocks:
            self._read_directly(file, at, out[at - offset : max(at, block.start) - offset])
            at = max(at, block.start)
            self._read_block(block, at, out[at - offset : min(end, block.end) - offset])
            at = min(end, block.end)
        self._read_directly(file, at, out[at - offset :])

    # ---- the engine's threads

    def _read_block(self, block: FetchedBlock, offset: int, out: memoryview) -> None:
        with self._condition:
            block.pins += 1
            try:
                while block.state != "here" and self._want(block):
                    self._condition.wait()
            except BaseException:
                block.pins -= 1
                raise
            here = block.state == "here"
        try:
            if here:
                self._spool.read(block.slot, offset - block.start, out)
            else:  # there is no slot for it
                self._read_directly(block.file, offset, out)
        finally:
            with self._condition:
                block.pins -= 1
                block.read += len(out)
                self._settle(block)
                self._condition.notify_all()

    def _want(self, block: FetchedBlock) -> bool:
        """Have a block fetched before all others. False if there is no slot for it. Raises what fetching it raised."""
        if self._stop.is_set():
            raise CheckpointError("the run has ended", where=block.file.ranges.where)
        if block.error is not None:
            raise block.error
        if block.state == "":
            if not self._give_slot(block, urgent=True):
                return False
            self._urgent.append(block)
            self._condition.notify_all()
        return True

    def _read_directly(self, file: RemoteFile, offset: int, out: memoryview) -> None:
        """Fetch bytes that no visit reads, or that have no slot."""
        try:
            fetch_into(file.ranges, offset, out, self._stop)
        except Stopped:
            raise CheckpointError("the run has ended", where=file.ranges.where) from None
        with self._condition:
            self.fetched_bytes += len(out)

    def _settle(self, block: FetchedBlock) -> None:
        """Some bytes of a block were read: keep it, or give its slot back, if the last ones of a visit were among them."""
        while block.dues and block.read >= block.dues[0]:
            block.read -= block.dues.popleft()
            self._frontier = max(self._frontier, block.places.popleft())
        if block.state != "here" or block.pins or (block.dues and block.read):
            return
        if not block.places:
            self._drop(block)
        elif not block.kept and block.places[0] > self._frontier + _ahead(self._slots):
            if self._kept < self._slots - _ahead(self._slots):
                self._kept += 1
                block.kept = True
            else:
                self._drop(block)

    def _drop(self, block: FetchedBlock) -> None:
        """Give back the slot of a block that is here."""
        self._spool.give_back(block.slot)
        self._kept -= block.kept
        block.slot, block.state, block.kept = -1, "", False
        del self._here[block]
        if block.places and block.places[0] < self._pointer:
            heapq.heappush(self._late, block.places[0])

    # ---- the connections

    def _give_slot(self, block: FetchedBlock, *, urgent: bool) -> bool:
        """Take a slot for a block, that of another one which is not being read if none is free; False if there is none."""
        grows = self._spool.slots < self._slots
        if not self._spool.has_free and not grows:
            past = self._past()
            idle = [other for other in self._here if not other.pins]
            victims = [other for other in idle if other.places[0] < past]
            if urgent and not victims and idle:
                victims = [max(idle, key=lambda other: other.places[0])]
            for other in victims:
                self._drop(other)
        if not self._spool.has_free and not grows:
            return False
        block.slot, block.state = self._spool.take(), "wanted"
        return True

    def _past(self) -> int:
        """A place so far behind the reads that it will not be read again: a pass was shorter than planned."""
        return self._frontier - 2 * _ahead(self._slots)

    def _next(self) -> FetchedBlock | None:
        """The next block to fetch; None if there is nothing to fetch now."""
        if self._urgent:
            return self._urgent.popleft()
        while self._late or self._pointer < len(self._blocks.order):
            late = bool(self._late)
            place = heapq.heappop(self._late) if late else self._pointer
            block = self._blocks.order[place]
            is_needed = block.state == "" and block.error is None and place in block.places and place >= self._past()
            if is_needed and (place > self._frontier + _ahead(self._slots) or not self._give_slot(block, urgent=False)):
                if late:
                    heapq.heappush(self._late, place)
                return None
            self._pointer += not late
            if is_needed:
                return block
        return None

    def _work(self) -> None:
        """The loop of each connection."""
        while True:
            with self._condition:
                while not self._stop.is_set() and (block := self._next()) is None:
                    self._condition.wait()
                if self._stop.is_set():
                    return
                assert block is not None
                block.state = "coming"
            failed: Exception | None = None
            try:
                fetch(block.file.ranges, block.start, block.end, partial(self._put, block), self._stop)
            except Stopped:
                return
            except Exception as error:
                failed = error
            with self._condition:
                self._arrived(block, failed)
                self._condition.notify_all()

    def _put(self, block: FetchedBlock, at: int, piece: bytes) -> None:
        self._spool.write(block.slot, at - block.start, piece)

    def _arrived(self, block: FetchedBlock, failed: Exception | None) -> None:
        if failed is None:
            block.state = "here"
            self._here[block] = None
            self.fetched_bytes += block.end - block.start
            self._settle(block)
            return
        if isinstance(failed, StoreError):  # the disk is full: no more slots than now, and one less
            self._slots = self._spool.slots
        else:
            block.error = failed
            self._spool.give_back(block.slot)
        block.slot, block.state = -1, ""
