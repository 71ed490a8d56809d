"""Re-reads tensors from disk to verify their checksums, on a few threads with a bounded buffer each."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from weightsmith._base.files import read_all
from weightsmith._outputs.checksum import GrainHasher, combine, hash_grains
from weightsmith.abc.output import Progress

BUFFER_BYTES = 1 << 22
PART_BYTES = 1 << 26  # the unit of work of a thread


class Stored(NamedTuple):
    """A tensor on disk: `nbytes` from byte `offset` of the open file `fd`."""

    name: str
    fd: int
    offset: int
    nbytes: int
    grain_bytes: int


def reread(tensors: Sequence[Stored], *, threads: int = 2, progress: Progress | None = None) -> dict[str, str]:
    """The checksum of each tensor on disk; "" for one that cannot be read completely.

    Memory: `threads` buffers of 4 MiB.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    digests: list[dict[int, bytes | None]] = [{} for _ in tensors]
    parts = _parts(tensors)
    lock = threading.Lock()
    stop = threading.Event()
    done = 0

    def work() -> None:
        nonlocal done
        buffer = memoryview(bytearray(BUFFER_BYTES))
        while not stop.is_set():
            with lock:
                part = next(parts, None)
            if part is None:
                return
            number, start, nbytes = part
            found = _digests(tensors[number], start, nbytes, buffer)
            with lock:
                digests[number][start] = found
                done += nbytes
                if progress is not None:
                    progress(done, total)

    if threads <= 1:
        work()
    else:
        with ThreadPoolExecutor(threads) as pool:
            workers = [pool.submit(work) for _ in range(threads)]
            try:
                for worker in workers:
                    worker.result()
            finally:
                stop.set()  # after an error or Ctrl-C, the others end after their current part

    result: dict[str, str] = {}
    for tensor, runs in zip(tensors, digests, strict=True):
        whole = [runs[start] for start in sorted(runs)]
        result[tensor.name] = "" if None in whole else combine(b"".join(run for run in whole if run is not None))
    return result


def _parts(tensors: Sequence[Stored]) -> Iterator[tuple[int, int, int]]:
    """(tensor number, first byte, bytes): runs of whole grains."""
    for number, tensor in enumerate(tensors):
        step = tensor.grain_bytes * max(1, PART_BYTES // tensor.grain_bytes)
        for start in range(0, tensor.nbytes, step):
            yield number, start, min(step, tensor.nbytes - start)


def _digests(tensor: Stored, start: int, nbytes: int, buffer: memoryview) -> bytes | None:
    if nbytes <= BUFFER_BYTES:
        piece = buffer[:nbytes]
        return hash_grains(piece, tensor.grain_bytes) if _read(tensor, start, piece) else None
    hasher = GrainHasher(tensor.grain_bytes)
    end = start + nbytes
    while start < end:
        piece = buffer[: min(BUFFER_BYTES, end - start)]
        if not _read(tensor, start, piece):
            return None
        hasher.update(piece)
        start += piece.nbytes
    return hasher.digests()


def _read(tensor: Stored, start: int, piece: memoryview) -> bool:
    """Fill the piece; False if the file ends or cannot be read."""
    try:
        return read_all(tensor.fd, piece, tensor.offset + start) == piece.nbytes
    except OSError:  # a bad sector counts as damage: the tensor is reported and the rest is still checked
        return False
