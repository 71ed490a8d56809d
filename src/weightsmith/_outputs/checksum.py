"""Checksums of tensors: xxh3_64 of every grain, xxh3_128 of those.

A grain is a function of the shape alone (`weightsmith._base.tensors.grain_elements`), so tiles of any size, written in any
order by any thread or machine, give the same checksum, and no tensor has to be read twice or held whole to be hashed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from weightsmith._base.tensors import TensorSpec, grain_elements

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
