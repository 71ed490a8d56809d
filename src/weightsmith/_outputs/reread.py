"""Re-reads tensors to verify their checksums, on a few threads, in pieces of bounded size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from weightsmith._base.files import read_all
from weightsmith._outputs.checksum import GrainHasher, combine, hash_grains
from weightsmith.abc.output import Progress

PIECE_BYTES = 1 << 22
PART_BYTES = 1 << 26  # the unit of work of a thread


class Stored(NamedTuple):
    """A stored tensor: `nbytes` from byte `offset` of a file. read: bytes of it, from a byte on; fewer if the file ends."""

    name: str
    read: Callable[[int, int], bytes | memoryview]
    offset: int
    nbytes: int
    grain_bytes: int


def read_at(fd: int, start: int, nbytes: int) -> memoryview:
    """Bytes of an open file, from a byte on; fewer if it ends."""
    out = np.empty(nbytes, np.uint8).data  # not filled with zeros
    return out[: read_all(fd, out, start)]


def reread(
    tensors: Sequence[Stored], *, threads: int = 2, progress: Progress | None = None, piece_bytes: int | None = None
) -> dict[str, str]:
    """The checksum of each tensor as it is stored; "" for one that cannot be read completely.

    Memory: `threads` pieces of `piece_bytes` (4 MiB).
    """
    total = sum(tensor.nbytes for tensor in tensors)
    digests: list[dict[int, bytes | None]] = [{} for _ in tensors]
    parts = _parts(tensors)
    lock = threading.Lock()
    stop = threading.Event()
    done = 0

    def work() -> None:
        nonlocal done
        while not stop.is_set():
            with lock:
                part = next(parts, None)
            if part is None:
                return
            number, start, nbytes = part
            part_digests = _digests(tensors[number], start, nbytes, piece_bytes or PIECE_BYTES)
            with lock:
                digests[number][start] = part_digests
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


def _digests(tensor: Stored, start: int, nbytes: int, piece_bytes: int) -> bytes | None:
    """The digests of a run of grains; None if some of its bytes cannot be read."""
    hasher = GrainHasher(tensor.grain_bytes)
    for at in range(start, start + nbytes, piece_bytes):
        piece_nbytes = min(piece_bytes, start + nbytes - at)
        try:
            piece = memoryview(tensor.read(tensor.offset + at, piece_nbytes))
        except OSError:  # a bad sector counts as damage: the tensor is reported and the rest is still checked
            return None
        if piece.nbytes < piece_nbytes:
            return None
        if piece_nbytes == nbytes:
            return hash_grains(piece, tensor.grain_bytes)
        hasher.update(piece)
    return hasher.digests()
