"""Measures how far a merge moves from its base."""

from __future__ import annotations

import numpy as np

from weightsmith._engine.active import LeafPass
from weightsmith._engine.buffers import Buffers
from weightsmith._engine.reader import Reader
from weightsmith._engine.tiles import Cut
from weightsmith._kernels.delta import distance
from weightsmith._kernels.records import Encoded
from weightsmith.abc.job import Bytes


class Measurer:
    """Enters the squared norms of output - base and of the base into `LeafPass.distances`, for leaves with a base."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __call__(self, leaf: LeafPass, place: Cut, raw: Bytes, out: Bytes, buffers: Buffers) -> None:
        """Measure one tile. raw: bytes of the inputs, the base first; out: of the result, in the tensor's dtype."""
        if not len(leaf.distances):
            return
        first = place.start // leaf.grain
        totals = leaf.distances[first : first + -(-place.size // leaf.grain)]
        code, out_code = self._reader.dtype(leaf.leaf.inputs[0]).code, leaf.leaf.out.dtype.code
        rows, sums = buffers.scratch.rows(2, np.array([code]), out_code), buffers.scratch.sums(2)
        distance(Encoded(raw[0], code), Encoded(out, out_code), place.size, leaf.grain, totals, rows, sums)
