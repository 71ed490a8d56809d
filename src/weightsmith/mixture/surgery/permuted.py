"""Experts whose neurons have changed places, as one more input model: the engine reads it like any other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from weightsmith.checkpoint import Checkpoint
from weightsmith.mixture.computed import Unstored
from weightsmith.mixture.surgery.neurons import Carrier
from weightsmith.tensors import TensorSpec


class Permuted(Unstored):
    """A model whose tensors are those of another with rows or columns in another order. Nothing is held but the orders.

    `add` says which tensor and whose neurons, which is all that a plan needs; `order` gives the orders.
    """

    def __init__(self, source: Checkpoint) -> None:
        super().__init__()
        self.source = source
        self._carriers: dict[str, tuple[Carrier, str]] = {}
        self._orders: dict[str, npt.NDArray[np.int64]] = {}

    def add(self, name: str, carrier: Carrier, owner: str) -> None:
        """A tensor of this model: what `carrier` says, with the neurons in the order of `owner`."""
        self._enter(TensorSpec(name, carrier.spec.dtype, carrier.shape))
        self._carriers[name] = carrier, owner

    def order(self, owner: str, order: npt.NDArray[np.int64]) -> None:
        """Neuron i of `owner` becomes what neuron order[i] was. order: a permutation."""
        assert np.array_equal(np.sort(order), np.arange(len(order))), owner
        self._orders[owner] = order

    @property
    def header_hash(self) -> str:  # type: ignore[override]
        """Of what is reordered; in which order follows from the other model."""
        told = [(name, str(carrier), owner) for name, (carrier, owner) in self._carriers.items()]
        return xxhash.xxh3_128_hexdigest(repr([self.source.header_hash, told]).encode())

    @property
    def state_hash(self) -> str:  # type: ignore[override]
        """Of the orders too: work that was interrupted goes on only with the same ones, so they must be known by then.

        What an expert has in one tensor must lie as in the others, and equal neurons may be matched otherwise another time.
        """
        hasher = xxhash.xxh3_128(self.header_hash.encode())
        for owner, order in self._orders.items():
            hasher.update(owner.encode())
            hasher.update(order.tobytes())
        return hasher.hexdigest()

    def read_into(self, name: str, start_byte: int, buffer: Any) -> None:
        carrier, owner = self._carriers[name]
        places = carrier.places(self._orders[owner])
        width, cols = carrier.spec.dtype.itemsize, carrier.shape[1]
        out = np.frombuffer(buffer, np.uint8).reshape(-1, width)
        first, end = start_byte // width, start_byte // width + len(out)
        if carrier.axis == 1:  # whole rows are read, and their columns gathered
            top, bottom = first // cols, -(-end // cols)
            rows = np.empty((bottom - top, cols, width), np.uint8)
            self.source.read_into(carrier.spec.name, (carrier.offset + top * cols) * width, rows.reshape(-1))
            out[:] = rows[:, places].reshape(-1, width)[first - top * cols : end - top * cols]
            return
        done = first
        while done < end:  # one row after another, or what is wanted of it
            row, col = divmod(done, cols)
            n = min(cols - col, end - done)
            start = carrier.offset + int(places[row]) * cols + col
            self.source.read_into(carrier.spec.name, start * width, out[done - first : done - first + n].reshape(-1))
            done += n
