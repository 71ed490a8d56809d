"""Merges tiles: reads the inputs, calls the job of the pass that is under way, and checks what comes out."""

from __future__ import annotations

from typing import Any, Protocol

from weightsmith._engine.active import LeafPass
from weightsmith._engine.buffers import Buffers
from weightsmith._engine.constants import Constants, Finite
from weightsmith._engine.reader import Reader
from weightsmith._engine.tiles import Cut
from weightsmith._plans import CAST
from weightsmith.abc.job import Bytes, Job, Tile


class Measure(Protocol):
    """See `measurer.Measurer`."""

    def __call__(self, leaf: LeafPass, place: Cut, raw: Bytes, out: Bytes, buffers: Buffers) -> None: ...


def _not_measured(leaf: LeafPass, place: Cut, raw: Bytes, out: Bytes, buffers: Buffers) -> None:
    pass


class Merger:
    """The work on one tile of a leaf with a job. Thread-safe; each thread has its own buffers.

    measure  called with each result, before constants that are not finite are put into it
    """

    def __init__(self, reader: Reader, finite: Finite, measure: Measure = _not_measured) -> None:
        self._reader = reader
        self._finite = finite
        self._measure = measure

    def statistics(self, leaf: LeafPass, place: Cut, buffers: Buffers) -> tuple[Any, int]:
        """Statistics of a tile in the pass that is under way, and the bytes that were read."""
        job, tile, read, _ = self._read(leaf, place, buffers)
        return job.statistics(leaf.phase, tile), read

    def apply(self, leaf: LeafPass, place: Cut, out: Bytes, buffers: Buffers) -> int:
        """Fill `out` with a tile of the result, in the tensor's dtype. Returns the bytes that were read."""
        job, tile, read, constants = self._read(leaf, place, buffers)
        job.apply(tile, out)
        self._finite.check_result(leaf.leaf, leaf.active.step.out, leaf.origin, place, tile.raw, out)
        self._measure(leaf, place, tile.raw, out, buffers)
        if constants is not None:
            constants.put(out, leaf.leaf.out.dtype)
            leaf.active.nonfinite = True
        return read

    def _read(self, leaf: LeafPass, place: Cut, buffers: Buffers) -> tuple[Job, Tile, int, Constants | None]:
        """The job, a tile of its inputs without constants that are not finite, the bytes read, and these constants."""
        assert leaf.job is not None
        raw, read = self._reader.read(leaf.leaf.inputs, place.start, place.size, buffers)
        constants, encoded = None, leaf.active.encoded
        # Every tile is checked in the first pass. Later ones need that only where it found constants.
        if (leaf.number == 0 or leaf.constants) and (leaf.leaf.op != CAST or encoded):
            constants = self._finite.take_constants(leaf.leaf, place, raw, encoded=encoded)
            leaf.constants |= constants is not None
        return leaf.job, Tile(place.start, place.size, raw, buffers.scratch), read, constants
