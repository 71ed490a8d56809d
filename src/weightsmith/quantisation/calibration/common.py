"""What the products of a calibration have in common: the decoder, rows of states, progress."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from weightsmith.decoder import Base
from weightsmith.decoder.forward import Decoder, build
from weightsmith.errors import NonFinite, ParameterError, PlanError, WeightsmithError
from weightsmith.jobs.requires import usable_device
from weightsmith.outputs.local.products import release_pages
from weightsmith.products.base import Bench, Floats

WORK_BYTES = 4 << 30
"""Limit of the Hessians that are held at once, and of what their factorisations take together, if the run has no limit."""

INSTEAD = "; or use --calibration none, which needs no forward pass"


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors of weightsmith are of this place."""
    try:
        yield
    except WeightsmithError as error:
        error.finding = replace(error.finding, where=where)
        raise


NUMBERED_ROW = tuple[int, Tensor]
"""A row's number, and its states [tokens, hidden]."""


def decoder_of(base: Base) -> Decoder:
    """The module of a model, without weights. Raises PlanError."""
    return _decoder(json.dumps(asdict(base), sort_keys=True))


@lru_cache(maxsize=1)
def _decoder(text: str) -> Decoder:
    found = build(Base(**json.loads(text)), {}, INSTEAD)
    if isinstance(found, WeightsmithError):
        raise PlanError([found])
    return found


def device_of(bench: Bench) -> str:
    """The torch device. Raises PlanError for one that cannot be used."""
    try:
        return usable_device(bench.device)
    except ParameterError as error:
        raise PlanError([error]) from error


def budget(bench: Bench) -> int:
    """The bytes that the Hessians of a product may take, and their factorisations likewise: half of its memory each."""
    return WORK_BYTES if bench.memory_bytes is None else bench.memory_bytes // 2


class Room:
    """Memory that threads share: `with room(nbytes):` waits until so many bytes are free. One alone may take more than all."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._taken = 0
        self._condition = threading.Condition()

    @contextmanager
    def __call__(self, nbytes: int) -> Iterator[None]:
        """Take some bytes, and give them back."""
        with self._condition:
            self._condition.wait_for(lambda: not self._taken or self._taken + nbytes <= self._limit)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._condition:
                self._taken -= nbytes
                self._condition.notify_all()


class PhaseProgress:
    """Reports the progress of all products of a phase as one: each layer counts `UNITS`.

    first, last  the part of the layer's units that this product takes
    """

    UNITS = 1000

    def __init__(self, bench: Bench, base: Base, layer: int, first: float, last: float) -> None:
        self._bench = bench
        self._total = base.layers * self.UNITS
        self._start = (layer + first) * self.UNITS
        self._span = (last - first) * self.UNITS

    def __call__(self, share: float) -> None:
        """share: how much of this product is done, 0 … 1. Raises Cancelled."""
        self._bench.progress(min(self._total, round(self._start + share * self._span)), self._total)


def row_batches(
    states: Floats, at_once: int, device: str, progress: PhaseProgress, span: tuple[float, float]
) -> Iterator[list[NUMBERED_ROW]]:
    """Rows of states, some at a time, as tensors of their own. span: of the product's progress."""
    first, last = span
    for start in range(0, len(states), at_once):
        progress(first + (last - first) * start / len(states))
        numbers = range(start, min(start + at_once, len(states)))
        yield [(r, torch.from_numpy(np.array(states[r])).to(device)) for r in numbers]
        release_pages(states)


def check_finite(x: Tensor, what: str, row: int, base: Base) -> None:
    """Raise NonFinite, with the layer and the row, unless all numbers have finite squares."""
    if not bool(torch.isfinite(x.abs().max() ** 2)):
        raise NonFinite(
            f"{what} is NaN, infinite or too large in row {row} of the calibration text",
            where=base.label,
            fix="check the model with another program; if its activations overflow there too, use --calibration none",
            state="Nothing was published. Finished layers are kept; with a changed model or calibration, add --no-resume.",
        )
