"""What a search for a good merge will cost: `weightsmith auto --plan`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._activations.decoder import Arithmetic
from weightsmith._activations.decoder.forward import fast_arithmetic
from weightsmith._activations.statistic import shapes_of
from weightsmith._activations.statistics import find_statistic
from weightsmith._base.report.blocks import Column, Facts, Report, Reported, Table, Value
from weightsmith._base.text import count, duration, size
from weightsmith._base.torch_use import one_thread, usable_device
from weightsmith._engine.resources import Resources
from weightsmith._methods.regmean import KIND
from weightsmith._outputs.disk import available_bytes
from weightsmith._plans import Step
from weightsmith._reports.auto.pool import FEW_ROWS
from weightsmith._reports.auto.texts import HELD_ROWS, OWN_ROWS, STATISTICS_ROWS
from weightsmith._reports.evaluate.opening import Opened

STATISTICS = "statistics"
"""The folder of statistics, in that of unfinished work."""

PROCESS_BYTES = 700_000_000
"""Memory of Python, torch and transformers."""

EIGENVECTORS = 25
"""Operations for the eigenvectors of a symmetric matrix, as a multiple of the cube of its side."""

FLOAT64 = 2
"""A product in float64 takes so many times as long as one in float32."""

MATRICES = 2
"""Float64 matrices of the size of each weight that are on the disk together: Σ δG, which the second RegMean takes the place of,
and the first."""

SAMPLING = 2.5
"""A token that is written takes so many times as long as one that is read: few run together."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: what it does, and the products of float32 numbers that take as long."""

    name: str
    what: str
    operations: float


@dataclass(frozen=True)
class SearchPlan(Reported):
    """What `auto` would do.

    out                the folder that would be written
    candidates         that would be scored on all held-back rows, besides the base and the mean
    stages             in order
    processor_seconds  estimate, from the speed of a product of matrices on this machine just now
    threads            that share them
    memory_bytes       peak, about
    disk_bytes         that are taken until the end, besides the output, if there is room
    needed_bytes       of the disk without which it does not begin: statistics, and the output
    free_bytes         of the disk
    """

    out: Path
    candidates: int
    stages: tuple[Stage, ...]
    processor_seconds: float
    threads: int
    memory_bytes: int
    disk_bytes: int
    needed_bytes: int
    free_bytes: int

    def report(self) -> Report:
        rate = sum(stage.operations for stage in self.stages) / self.processor_seconds
        facts: tuple[tuple[str, Value], ...] = (
            ("would write", str(self.out)),
            ("candidates", f"{self.candidates}, the base and the mean"),
            ("time", f"about {duration(self.processor_seconds / self.threads)} on {count(self.threads, 'thread')}"),
            ("CPU time", f"about {duration(self.processor_seconds)}"),
            ("memory", f"about {size(self.memory_bytes)}"),
            ("disk", f"{size(self.disk_bytes)} until the end, and the output; at least {size(self.needed_bytes)} in all"),
            ("free", f"{size(self.free_bytes)} of the disk"),
        )
        fits = self.needed_bytes <= self.free_bytes
        refused = f"auto would not begin: free {size(self.needed_bytes - self.free_bytes)} of the disk."
        rows = tuple((stage.name, stage.what, duration(stage.operations / rate)) for stage in self.stages)
        columns = (Column("stage"), Column("what"), Column("CPU time", "text"))
        return Report(
            f"{self.out.name}: what auto would do",
            ("Nothing was written.", *(() if fits else (refused,))),
            (Facts("Plan", facts), Table("Stages", columns, rows, "An estimate: other programs take their share.")),
            self.to_json(),
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        rate = sum(stage.operations for stage in self.stages) / self.processor_seconds
        return {
            "out": str(self.out),
            "candidates": self.candidates,
            "stages": [
                {"name": stage.name, "what": stage.what, "processor_seconds": stage.operations / rate} for stage in self.stages
            ],
            "processor_seconds": self.processor_seconds,
            "threads": self.threads,
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "needed_bytes": self.needed_bytes,
            "free_bytes": self.free_bytes,
        }


def plan_search(
    one: Opened, out: Path, folder: Path, models: int, tokens: int, candidates: int, resources: Resources, *, with_texts: bool
) -> SearchPlan:
    """Count what a search does.

    one         the mean of the fine-tunes
    folder      of unfinished work, beside `out`
    models      fine-tunes
    tokens      of a row
    candidates  scored on all held-back rows, besides the base and the mean
    """
    rate, narrow = _rate("float32"), 1.0
    if fast_arithmetic(usable_device(resources.device)) == "bfloat16":
        narrow = rate / _rate("bfloat16")
    steps = one.model.steps
    linear = [step for step in steps if step.role == "linear" and len(step.out.shape) >= 2]
    layers = 2.0 * sum(step.out.size for step in linear)
    head = 2.0 * max((step.out.size for step in steps if step.role == "vocabulary"), default=0)
    scored = narrow * layers + 2 * head  # a fine-tune's head predicts beside the candidate's
    held = models * HELD_ROWS * tokens
    measured = models * (STATISTICS_ROWS if with_texts else OWN_ROWS) * tokens
    strengths = 4 * models * FEW_ROWS * tokens
    written = 0 if with_texts else models * (OWN_ROWS + HELD_ROWS) * tokens
    moments = sum(2.0 * step.out.shape[-1] ** 2 for step in linear)
    searching = (2 * held + strengths) * scored + _singular_vectors(linear, models)
    scoring = candidates * held * scored + 2 * _solutions(linear, models)
    stages = (
        Stage("text", f"{written:,} tokens are written", SAMPLING * written * (narrow * layers + head)),
        Stage("references", f"{count(models, 'fine-tune')}, on {held:,} tokens", held * (narrow * layers + head)),
        Stage("strengths", f"the base and the mean on {held:,} tokens, four merges on {strengths // 4:,}", searching),
        Stage("statistics", f"of {measured:,} tokens", measured * (layers + moments)),
        Stage("candidates", f"{candidates:,}, on {held:,} tokens each", scoring),
    )[0 if written else 1 :]
    operations = sum(stage.operations for stage in stages)
    parameters = sum(step.out.size for step in steps)
    states = models * HELD_ROWS * tokens * 4 * min((step.out.shape[-1] for step in linear), default=0)
    heads = 2 * (models - 1) * int(head)  # of fine-tunes that have one of their own, in float32
    disk = disk_use(one, models, folder)
    # What does not fit in half of the free space is computed again.
    predictions = 4 * held * max((step.out.shape[0] for step in steps if step.role == "vocabulary"), default=0)
    kept = MATRICES * 8 * sum(step.out.size for step in linear) + predictions
    return SearchPlan(
        out,
        candidates,
        stages,
        operations / rate,
        resources.workers,
        PROCESS_BYTES + 8 * parameters + 2 * states + heads,
        disk.statistics + kept,
        disk.needed,
        disk.free,
    )


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes of the disk that a search cannot do without, and those that are free.

    kept  of the statistics, which an earlier call has left
    """

    statistics: int
    kept: int
    output: int
    free: int

    @property
    def needed(self) -> int:
        return max(self.statistics - self.kept, 0) + self.output


def disk_use(one: Opened, models: int, folder: Path) -> DiskUse:
    """What statistics and the output take, and the free space of the output's disk.

    one     the mean of the fine-tunes
    models  fine-tunes
    folder  of unfinished work, beside the output
    """
    steps = one.model.steps
    by_layer = defaultdict[str, list[str]](list)
    shapes = {step.out.name: step.out.shape for step in steps}
    for step in steps:
        if step.role == "linear" and len(step.out.shape) == 2:
            by_layer[step.layer].append(step.out.name)
    shared = [shapes_of(find_statistic(KIND), weights, shapes) for weights in by_layer.values()]
    statistics = 4 * models * sum(math.prod(shape) for of_layer in shared for shape in of_layer.values())
    kept = sum(path.stat().st_size for path in (folder / STATISTICS).rglob("*") if path.is_file())
    return DiskUse(statistics, kept, sum(step.nbytes for step in one.prepared.plan.steps), available_bytes(folder.parent))


def _singular_vectors(linear: Sequence[Step], models: int) -> float:
    return sum(models * FLOAT64 * EIGENVECTORS * float(min(step.out.shape[-2:])) ** 3 for step in linear)


def _solutions(linear: Sequence[Step], models: int) -> float:
    """Operations of RegMean: a product with each model's moments, a Cholesky factor, two triangular systems."""
    products = sum(2.0 * (models + 1) * step.out.size * step.out.shape[-1] for step in linear)
    return FLOAT64 * (products + sum(float(step.out.shape[-1]) ** 3 / 3 for step in linear))


def _rate(arithmetic: Arithmetic) -> float:
    """Products of numbers that one thread computes in a second, now."""
    import torch

    side = 768
    matrix = torch.ones(side, side, dtype=getattr(torch, arithmetic))
    with one_thread():
        matrix @ matrix
        began, calls = time.thread_time(), 0
        while time.thread_time() - began < 0.2 or calls < 3:
            matrix @ matrix
            calls += 1
        return 2.0 * side**3 * calls / (time.thread_time() - began)
