"""A donor's tensors in memory, few at a time: read from its files, or merged on the way."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Mapping
from functools import cached_property

import numpy as np

from weightsmith.engine.local import Run, run
from weightsmith.engine.schedule import RESIDENT_BYTES
from weightsmith.engine.survey import conduct
from weightsmith.engine.tiles import TILE_BYTES
from weightsmith.jobs.job import Bytes
from weightsmith.jobs.survey import Survey
from weightsmith.mixture.assembly import Assembly, Donor
from weightsmith.planner.steps import MOE, Plan, Step
from weightsmith.tensors import TensorSpec


class Materialiser:
    """Makes tensors of a donor by running the engine on their steps alone."""

    def __init__(self, donor: Donor, assembly: Assembly, seed: int) -> None:
        self._donor = donor
        self._assembly = assembly
        self._seed = seed

    def tensors(self, names: Collection[str]) -> dict[str, tuple[TensorSpec, np.ndarray]]:
        """The bytes of these tensors (uint8 [nbytes]) and what they are. Raises as the engine does."""
        steps = tuple(self._donor.steps[name] for name in names)
        output = _Memory(steps)
        threads = len(os.sched_getaffinity(0))
        run(self._plan(steps), self._assembly.inputs, output, threads=threads, surveys=self._surveys)
        data, output.data = output.data, {}  # the run and its output refer to each other, and are only collected later
        return {step.out.name: (step.out, data[step.out.name]) for step in steps}

    def _plan(self, steps: tuple[Step, ...]) -> Plan:
        return Plan(MOE, tuple(self._assembly.models), steps, tuple(self._assembly.settings), seed=self._seed)

    @cached_property
    def _surveys(self) -> Mapping[str, Survey]:
        """A merge that must see the whole model first sees it once, and not for each layer."""
        plan = self._plan(tuple(self._donor.steps.values()))
        whole = Run(
            plan,
            self._assembly.inputs,
            _Memory(()),
            tile_bytes=TILE_BYTES,
            resident_bytes=RESIDENT_BYTES,
            skip=(),
            allow_nonfinite=False,
        )
        return conduct(whole, len(os.sched_getaffinity(0)), lambda: None)


class _Memory:
    """The engine's output: arrays of bytes."""

    def __init__(self, steps: Collection[Step]) -> None:
        # Pages of their own: malloc would keep those of every layer, in pieces that the next layer does not fit in.
        self.data = {s.out.name: np.frombuffer(mmap.mmap(-1, max(1, s.out.nbytes)), np.uint8, s.out.nbytes) for s in steps}

    def location(self, name: str) -> tuple[int, int]:
        return -1, 0  # no file: copy_file_range refuses it, and the engine then copies what it has read

    def write(self, name: str, start_byte: int, buffer: memoryview | Bytes) -> None:
        data = np.frombuffer(buffer, np.uint8)
        self.data[name][start_byte : start_byte + data.size] = data

    def finish(self, name: str, checksum: str) -> None:
        pass
