"""The checksum of a tensor whose bytes are written in any order by any thread."""

from __future__ import annotations

import threading

from weightsmith._base.tensors import TensorSpec
from weightsmith._outputs.checksum import DIGEST_BYTES, combine, grain_bytes, hash_grains
from weightsmith.abc.job import Bytes


class TensorHash:
    """The digests of one tensor's grains. A grain that several tiles fill is hashed when the last of them is in."""

    def __init__(self, spec: TensorSpec) -> None:
        self._nbytes = spec.nbytes
        self._grain = grain_bytes(spec)
        self._digests = bytearray(-(-spec.nbytes // self._grain) * DIGEST_BYTES)
        self._lock = threading.Lock()
        self._shared: dict[int, tuple[bytearray, int]] = {}  # grains that several tiles fill, and the bytes still missing

    def update(self, start: int, data: Bytes) -> None:
        """Enter the bytes from `start` on. Every byte is entered once."""
        grain = self._grain
        end = start + len(data)
        head = min(-(-start // grain) * grain, end)
        tail = end if end == self._nbytes else max(head, end // grain * grain)
        if head < tail:
            digests = hash_grains(data[head - start : tail - start], grain)
            at = head // grain * DIGEST_BYTES
            self._digests[at : at + len(digests)] = digests
        if start < head:
            self._fill(start, data[: head - start])
        if tail < end:
            self._fill(tail, data[tail - start :])

    def _fill(self, start: int, piece: Bytes) -> None:
        """Some bytes of a grain that ends or begins in another tile."""
        number = start // self._grain
        nbytes = min(self._grain, self._nbytes - number * self._grain)
        with self._lock:
            held, missing = self._shared.pop(number, (bytearray(), nbytes))
            held = held or bytearray(nbytes)
            at = start - number * self._grain
            held[at : at + len(piece)] = piece.tobytes()
            missing -= len(piece)
            if missing:
                self._shared[number] = held, missing
            else:
                self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = hash_grains(held, nbytes)

    def checksum(self) -> str:
        """32 hex digits, once all bytes are in."""
        return combine(bytes(self._digests))
