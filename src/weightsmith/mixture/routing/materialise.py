"""A donor's tensors in memory as float32, few at a time: read from its files, or merged on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightsmith.engine.local import Progress, Run, run
from weightsmith.engine.schedule import RESIDENT_BYTES
from weightsmith.engine.survey import conduct
from weightsmith.engine.tiles import TILE_BYTES
from weightsmith.jobs.job import Bytes
from weightsmith.jobs.survey import Survey
from weightsmith.kernels.codecs import decode
from weightsmith.mixture.assembly import Assembly, Donor
from weightsmith.planner.steps import MOE, Plan, Step
from weightsmith.tensors import TensorSpec

Floats = npt.NDArray[np.float32]


class Materialiser:
    """Makes tensors of a donor by running the engine on their steps alone.

    Numbers are those of the donor as it is, or would be, stored; they become float32 tile by tile, so that nothing but the
    arrays that they go into takes memory. Raises as the engine does.

    report  called about ten times a second while the engine runs; what it raises stops that
    """

    def __init__(self, donor: Donor, assembly: Assembly, seed: int, report: Callable[[], None] = lambda: None) -> None:
        self._report = report
        self._donor = donor
        self._assembly = assembly
        self._seed = seed

    def fill(self, arrays: Mapping[str, Floats]) -> None:
        """Fill C-contiguous arrays with whole tensors. arrays: by the donor's names, each of its tensor's shape."""
        self._run({name: _Whole(self._donor.steps[name].out, array) for name, array in arrays.items()})

    def rows(self, name: str, numbers: Sequence[int]) -> Floats:
        """Some rows of a matrix [R, C]: [len(numbers), C]. numbers: ascending, each once."""
        spec = self._donor.steps[name].out
        found = np.empty((len(numbers), spec.shape[1]), np.float32)
        self._run({name: _Rows(spec, np.array(numbers, np.int64), found)})
        return found

    def _run(self, targets: Mapping[str, _Target]) -> None:
        plan = self._plan(tuple(self._donor.steps[name] for name in targets))
        run(plan, self._assembly.inputs, _Memory(targets), threads=_threads(), progress=self._progress, surveys=self._surveys)

    def _plan(self, steps: tuple[Step, ...]) -> Plan:
        return Plan(MOE, tuple(self._assembly.models), steps, tuple(self._assembly.settings), seed=self._seed)

    @cached_property
    def _surveys(self) -> Mapping[str, Survey]:
        """A merge that must see the whole model first sees it once, and not for each layer."""
        whole = Run(
            self._plan(tuple(self._donor.steps.values())),
            self._assembly.inputs,
            _Memory({}),
            tile_bytes=TILE_BYTES,
            resident_bytes=RESIDENT_BYTES,
            skip=(),
            allow_nonfinite=False,
        )
        return conduct(whole, _threads(), self._report)

    def _progress(self, now: Progress) -> None:
        self._report()


def _threads() -> int:
    return len(os.sched_getaffinity(0))


class _Target(Protocol):
    """Takes the numbers of one tensor."""

    def take(self, start_byte: int, data: Bytes) -> None:
        """Some of its bytes as they are stored: whole elements. Called from many threads."""


class _Whole:
    def __init__(self, spec: TensorSpec, array: Floats) -> None:
        assert array.shape == spec.shape, (spec, array.shape)
        self._spec = spec
        self._flat = array.reshape(-1)
        assert not self._flat.size or np.shares_memory(self._flat, array)

    def take(self, start_byte: int, data: Bytes) -> None:
        width = self._spec.dtype.itemsize
        first, count = start_byte // width, len(data) // width
        _decode(self._spec, data, 0, count, self._flat[first : first + count])


class _Rows:
    def __init__(self, spec: TensorSpec, numbers: npt.NDArray[np.int64], found: Floats) -> None:
        self._spec = spec
        self._numbers = numbers
        self._found = found

    def take(self, start_byte: int, data: Bytes) -> None:
        cols, width = self._spec.shape[1], self._spec.dtype.itemsize
        first, end = start_byte // width, (start_byte + len(data)) // width
        for k in range(*np.searchsorted(self._numbers, [first // cols, -(-end // cols)])):
            row = int(self._numbers[k]) * cols
            start, stop = max(first, row), min(end, row + cols)
            _decode(self._spec, data, start - first, stop - start, self._found[k, start - row : stop - row])


def _decode(spec: TensorSpec, data: Bytes, start: int, count: int, out: Floats) -> None:
    """out = elements start … start + count of the bytes of a tensor."""
    if spec.dtype.code >= 0:
        decode(data, spec.dtype.code, start, count, out)
    else:
        out[:] = data.view(spec.dtype.numpy)[start : start + count]


class _Memory:
    """The engine's output: what each tensor is for takes its bytes."""

    def __init__(self, targets: Mapping[str, _Target]) -> None:
        self._targets = targets

    def location(self, name: str) -> tuple[int, int]:
        return -1, 0  # no file: copy_file_range refuses it, and the engine then copies what it has read

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        self._targets[name].take(start_byte, np.frombuffer(buffer, np.uint8))

    def finish(self, name: str, checksum: str) -> None:
        pass
