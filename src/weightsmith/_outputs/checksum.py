"""Checksums of tensors: xxh3_64 of every grain, xxh3_128 of those.

A grain is a function of the shape alone (`weightsmith._base.tensors.grain_elements`), so tiles of any size, written in any
order by any thread or machine, give the same checksum, and no tensor has to be read twice or held whole to be hashed. `reread`
hashes stored tensors again, on a few threads, in pieces of bounded size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from weightsmith._base.files import read_all
from weightsmith._base.tensors import TensorSpec, grain_elements
from weightsmith.abc.output import Progress

if TYPE_CHECKING:
    from weightsmith.abc.output import BytesLike


DIGEST_BYTES = 8  # of one grain


def grain_bytes(spec: TensorSpec) -> int:
    """Bytes of one grain of this tensor; its last grain may be shorter.

    >>> from weightsmith._base.tensors import DTYPES
    >>> grain_bytes(TensorSpec("w", DTYPES["BF16"], (1000, 4096)))
    131072
    """
    return max(1, grain_elements(spec.shape) // spec.dtype.block) * spec.dtype.itemsize


def byte_view(buffer: BytesLike) -> memoryview:
    """One-dimensional view of the bytes of a C-contiguous buffer; TypeError for any other."""
    view = memoryview(buffer)  # type: ignore[arg-type,unused-ignore]
    if view.nbytes == 0:  # memoryview.cast refuses shapes with a zero
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else view.cast("B")


def hash_grains(buffer: BytesLike, grain_bytes: int) -> bytes:
    """The digests of a run of whole grains (the tensor's last grain may be short): 8 little-endian bytes each, joined.

    The runs of a tensor, hashed apart and joined in order, give the same bytes as the whole. No bytes give no digests.

    >>> hash_grains(b"a" * 10, 4) == hash_grains(b"a" * 8, 4) + hash_grains(b"aa", 4)
    True
    """
    view = byte_view(buffer)
    digest = xxhash.xxh3_64_intdigest
    return b"".join([digest(view[i : i + grain_bytes]).to_bytes(8, "little") for i in range(0, view.nbytes, grain_bytes)])


def combine(digests: bytes) -> str:
    """A tensor's checksum (32 hex digits) from all its grain digests in order.

    >>> combine(hash_grains(b"", 4))
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(digests)


def hash_bytes(data: BytesLike) -> str:
    """xxh3_128 of plain bytes (32 hex digits): for headers and for files that are not weights."""
    return xxhash.xxh3_128_hexdigest(byte_view(data))


class GrainHasher:
    """The checksum of a tensor that comes as a stream of pieces cut anywhere, in constant memory.

    >>> hasher = GrainHasher(grain_bytes=4)
    >>> for piece in (b"aaa", b"aaaaaa", b"a"):
    ...     hasher.update(piece)
    >>> hasher.checksum() == combine(hash_grains(b"a" * 10, 4))
    True
    """

    def __init__(self, grain_bytes: int) -> None:
        self._grain_bytes = grain_bytes
        self._digests = bytearray()
        self._open = xxhash.xxh3_64()
        self._filled = 0  # bytes of the open grain hashed so far

    def update(self, piece: BytesLike) -> None:
        """Hash the next bytes of the tensor."""
        view = byte_view(piece)
        start = 0
        if self._filled:
            start = min(self._grain_bytes - self._filled, view.nbytes)
            self._extend(view[:start])
        whole = (view.nbytes - start) // self._grain_bytes * self._grain_bytes
        if whole:
            self._digests += hash_grains(view[start : start + whole], self._grain_bytes)
        if start + whole < view.nbytes:
            self._extend(view[start + whole :])

    def _extend(self, view: memoryview) -> None:
        self._open.update(view)
        self._filled += view.nbytes
        if self._filled == self._grain_bytes:
            self._close_grain()

    def _close_grain(self) -> None:
        self._digests += self._open.intdigest().to_bytes(8, "little")
        self._open.reset()
        self._filled = 0

    def digests(self) -> bytes:
        """The digests of everything hashed so far, the last grain closed even if it is short."""
        if self._filled:
            self._close_grain()
        return bytes(self._digests)

    def checksum(self) -> str:
        """32 hex digits."""
        return combine(self.digests())


PIECE_BYTES = 1 << 22
PART_BYTES = 1 << 26  # the unit of work of a thread


class StoredBytes(NamedTuple):
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
    tensors: Sequence[StoredBytes], *, threads: int = 2, progress: Progress | None = None, piece_bytes: int | None = None
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


def _parts(tensors: Sequence[StoredBytes]) -> Iterator[tuple[int, int, int]]:
    """(tensor number, first byte, bytes): runs of whole grains."""
    for number, tensor in enumerate(tensors):
        step = tensor.grain_bytes * max(1, PART_BYTES // tensor.grain_bytes)
        for start in range(0, tensor.nbytes, step):
            yield number, start, min(step, tensor.nbytes - start)


def _digests(tensor: StoredBytes, start: int, nbytes: int, piece_bytes: int) -> bytes | None:
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
