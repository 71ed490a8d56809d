"""Blocks, their order, the spool, and the promise that nothing is fetched which nobody reads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from weightsmith._base.errors import CheckpointError, NoSpace
from weightsmith._base.files import Extent
from weightsmith._files.remote import ahead
from weightsmith._files.remote.ahead import Blocks, ReadAhead, estimate
from weightsmith._files.remote.folder import RemoteFile
from weightsmith._files.remote.retries import Again

KIB = 1 << 10


class Memory:
    """A file on a server that is in memory."""

    version = "1"

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self.where = f"file {seed}"
        self.nbytes = nbytes
        self.data = np.random.default_rng(seed).bytes(nbytes)
        self.asked: list[tuple[int, int]] = []
        self.broken = False
        self._lock = threading.Lock()

    def request(self, first: int, end: int) -> Iterator[bytes]:
        if self.broken:
            raise Again("it is broken")
        with self._lock:
            self.asked.append((first, end))
        for start in range(first, end, 3 * KIB):
            yield self.data[start : min(start + 3 * KIB, end)]

    def check_parts(self) -> None: ...

    def check_unchanged(self) -> None:
        pass

    @property
    def fetched(self) -> int:
        return sum(end - first for first, end in self.asked)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "BLOCK_BYTES", 16 * KIB)


def file_of(nbytes: int, seed: int = 0) -> tuple[Memory, RemoteFile]:
    memory = Memory(nbytes, seed)
    file = RemoteFile(memory)
    file.stream()
    return memory, file


def read(file: RemoteFile, offset: int, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    file.read_into(offset, memoryview(out))
    return bytes(out)


def test_blocks_cover_what_is_read_and_nothing_else() -> None:
    _, file = file_of(200 * KIB)
    spans = [(0, 10), (10, 20 * KIB), (100 * KIB, 5), (100 * KIB, 5), (100 * KIB + 3, 40 * KIB)]
    blocks = Blocks([[Extent(file, offset, nbytes)] for offset, nbytes in spans])
    covered = [(block.start, block.end) for block in blocks.of(file, 0, file.nbytes)]
    assert covered == [
        (0, 16 * KIB),
        (16 * KIB, 20 * KIB + 10),
        (100 * KIB, 116 * KIB),
        (116 * KIB, 132 * KIB),
        (132 * KIB, 140 * KIB + 3),
    ]
    assert [sum(block.dues) for block in blocks.of(file, 0, file.nbytes)] == [
        16 * KIB,
        4 * KIB + 10,
        5 + 5 + 16 * KIB - 3,
        16 * KIB,
        8 * KIB + 3,
    ]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_reads_gets_the_bytes_and_each_travels_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    sources = [file_of(int(random.integers(50, 400)) * KIB, k) for k in range(3)]
    visits = []
    for _ in range(40):
        memory, file = sources[int(random.integers(3))]
        start, end = sorted(random.integers(0, memory.nbytes, 2).tolist())
        visits += [[Extent(file, start, end - start)]] * int(random.integers(1, 3))
    visits = [visit for visit in visits if visit[0].nbytes]
    expected = estimate(visits)
    with ReadAhead(visits) as reading:
        tiles = [(piece, at) for visit in visits for piece in visit for at in range(0, piece.nbytes, 5000)]
        queue, lock = iter(tiles), threading.Lock()
        wrong: list[object] = []

        def work() -> None:
            while True:
                with lock:
                    tile = next(queue, None)
                if tile is None:
                    return
                extent, at = tile
                memory = extent.file.ranges
                start, n = extent.offset + at, min(5000, extent.nbytes - at)
                try:
                    if read(extent.file, start, n) != memory.data[start : start + n]:
                        wrong.append(tile)
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    fetched = sum(memory.fetched for memory, _ in sources)
    assert fetched == reading.fetched_bytes == expected.needed_bytes == expected.network_bytes
    assert all(count == 1 for memory, _ in sources for count in Counter(memory.asked).values())
    assert all(file.ahead is None for _, file in sources)


@pytest.mark.parametrize("slots", [8, 20, 1000])
def test_a_second_pass_reads_the_spool_as_far_as_it_reaches(slots: int) -> None:
    memory, file = file_of(1600 * KIB)
    tiles = [Extent(file, at, 16 * KIB) for at in range(0, memory.nbytes, 16 * KIB)]
    visits = [[tile] for tile in tiles] * 2
    expected = estimate(visits, slots * ahead.BLOCK_BYTES)
    assert expected.needed_bytes == memory.nbytes
    assert expected.passes == 2
    kept = min(100, slots - min(ahead.AHEAD_BLOCKS, slots // 2))
    assert expected.network_bytes == memory.nbytes * 2 - kept * 16 * KIB
    with ReadAhead(visits, slots * ahead.BLOCK_BYTES) as reading:
        for tile in tiles * 2:
            assert read(file, tile.offset, tile.nbytes) == memory.data[tile.offset : tile.offset + tile.nbytes]
    assert reading.fetched_bytes == expected.network_bytes


def test_passes_that_end_early_do_not_stop_the_others() -> None:
    memory, file = file_of(1600 * KIB)
    tiles = [Extent(file, at, 16 * KIB) for at in range(0, memory.nbytes, 16 * KIB)]
    with ReadAhead([[tile] for tile in tiles for _ in range(3)], 10 * ahead.BLOCK_BYTES) as reading:
        for tile in tiles:  # once, where three times were planned
            assert read(file, tile.offset, tile.nbytes) == memory.data[tile.offset : tile.offset + tile.nbytes]
    assert reading.fetched_bytes <= 1.5 * memory.nbytes


def test_bytes_that_no_plan_names_are_read_all_the_same() -> None:
    memory, file = file_of(300 * KIB)
    with ReadAhead([[Extent(file, 64 * KIB, 32 * KIB)]]):
        assert read(file, 0, memory.nbytes) == memory.data
        assert read(file, 5, 7) == memory.data[5:12]
    assert read(file, 5, 7) == memory.data[5:12]


def test_blocks_are_fetched_before_they_are_read_and_not_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "AHEAD_BLOCKS", 6)
    memory, file = file_of(1600 * KIB)
    tiles = [Extent(file, at, 16 * KIB) for at in range(0, memory.nbytes, 16 * KIB)]
    with ReadAhead([[tile] for tile in tiles]) as reading:
        read(file, 0, 16 * KIB)
        for _ in range(200):
            if len(memory.asked) >= 7:
                break
            threading.Event().wait(0.01)
        threading.Event().wait(0.05)
        assert len(memory.asked) == 7
        assert reading.fetched_bytes <= 7 * 16 * KIB


def test_a_file_that_cannot_be_fetched_is_an_error_of_who_reads_it() -> None:
    bad, file = file_of(64 * KIB)
    bad.broken = True
    good, other = file_of(64 * KIB, 1)
    with ReadAhead([[Extent(file, 0, 64 * KIB)], [Extent(other, 0, 64 * KIB)]]):
        assert read(other, 0, 64 * KIB) == good.data
        with pytest.raises(CheckpointError, match="cannot be read: it is broken, after 8 more attempts"):
            read(file, 0, 100)


def test_stopping_wakes_whoever_waits() -> None:
    memory, file = file_of(64 * KIB)
    entered, release = threading.Event(), threading.Event()
    request = memory.request

    def slow(first: int, end: int) -> Iterator[bytes]:
        entered.set()
        release.wait(60)
        yield from request(first, end)

    memory.request = slow  # type: ignore[method-assign]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            read(file, 0, 100)
        except BaseException as error:
            errors.append(error)

    reading = ReadAhead([[Extent(file, 0, 64 * KIB)]])
    with reading:
        thread = threading.Thread(target=work)
        thread.start()
        assert entered.wait(60)
        reading.stop()
        thread.join(60)
        assert not thread.is_alive()
        release.set()
    assert isinstance(errors[0], CheckpointError)
    assert "the run has ended" in str(errors[0])


def test_a_slot_is_not_given_away_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._files.remote.ahead import Spool

    monkeypatch.setattr(ahead, "CONNECTIONS", 1)
    monkeypatch.setattr(ahead, "AHEAD_BLOCKS", 0)
    plainly, entered, release = Spool.read, threading.Event(), threading.Event()

    def slowly(self: Spool, slot: int, offset: int, out: memoryview) -> None:
        if threading.current_thread().name == "slow":
            entered.set()
            assert release.wait(60)
        plainly(self, slot, offset, out)

    monkeypatch.setattr(Spool, "read", slowly)
    memory, file = file_of(32 * KIB)
    tiles = [Extent(file, at, 16 * KIB) for at in (0, 16 * KIB)]
    chunks: list[bytes] = []
    with ReadAhead([[tiles[0], tiles[0]], [tiles[1]]]):
        slow = threading.Thread(target=lambda: chunks.append(read(file, 0, 16 * KIB)), name="slow")
        slow.start()
        assert entered.wait(60)
        for start in (0, 0, 16 * KIB):
            assert read(file, start, 16 * KIB) == memory.data[start : start + 16 * KIB]
        release.set()
        slow.join()
    assert chunks == [memory.data[: 16 * KIB]]


def test_a_full_disk_slows_and_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightsmith._files.remote.ahead import Spool

    written = Spool.write
    taken: set[int] = set()

    def write(self: Spool, slot: int, offset: int, data: bytes) -> None:
        taken.add(slot)
        if len(taken) > 3:
            taken.discard(slot)
            raise NoSpace("no space", where="here")
        written(self, slot, offset, data)

    monkeypatch.setattr(Spool, "write", write)
    memory, file = file_of(800 * KIB)
    tiles = [Extent(file, at, 16 * KIB) for at in range(0, memory.nbytes, 16 * KIB)]
    with ReadAhead([[tile] for tile in tiles]):
        for tile in tiles:
            assert read(file, tile.offset, tile.nbytes) == memory.data[tile.offset : tile.offset + tile.nbytes]
