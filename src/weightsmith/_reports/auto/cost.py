"""What a search for a good merge will cost: `weightsmith auto --plan`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsmith._activations.decoder import Arithmetic
from weightsmith._activations.decoder.forward import fast_arithmetic
from weightsmith._activations.losses import LOGITS_AT_ONCE, TOKENS_AT_ONCE
from weightsmith._activations.running import WORK_BYTES
from weightsmith._activations.sampling import ROWS_TOGETHER
from weightsmith._activations.statistic import shapes_of
from weightsmith._activations.statistics import find_statistic
from weightsmith._base.report.blocks import Column, Facts, Report, Reported, Table, Value
from weightsmith._base.tensors import TensorSpec
from weightsmith._base.text import count, duration, size
from weightsmith._base.torch_use import installed_bytes, one_thread, usable_device
from weightsmith._engine.resources import Resources
from weightsmith._engine.results import DISK_SHARE
from weightsmith._methods.regmean import KIND
from weightsmith._outputs.disk import available_bytes
from weightsmith._plans import Step
from weightsmith._reports.auto.pool import DIRECTIONS, FEW_ROWS
from weightsmith._reports.auto.write import HELD_ROWS, OWN_ROWS, STATISTICS_ROWS
from weightsmith._reports.evaluate.opening import Opened
from weightsmith._reports.tuning.evaluator import BATCH_TOKENS, parts_of

STATISTICS = "statistics"
"""The folder of statistics, in that of unfinished work."""

PROCESS_BYTES = 400_000_000
"""Memory of Python and transformers, and of what malloc keeps. With torch's CPU build, 533 to 635 MB were measured."""

JOB_BYTES = 8_000_000
"""Memory of a job besides its matrices: torch's linear algebra and its work space."""

DRAWN_BYTES = 56
"""Memory for each token of the vocabulary where the next token of a row is drawn: logits, float64 shares and their sums."""

EIGENVECTORS = 25
"""Operations for the eigenvectors of a symmetric matrix, as a multiple of the cube of its side."""

FLOAT64 = 2
"""Time of a float64 product, as a multiple of that of a float32 product."""

MATRICES = 2
"""Float64 matrices, each as large as a weight, that are on the disk at the same time: the first RegMean, and Σ δG, which the
second RegMean replaces."""

LOSSES = 1.7
"""Time of a candidate's logits, their logarithms and the divergences, as a multiple of that of the logits alone."""

SAMPLING = 2.5
"""Time to write a token, as a multiple of the time to read one: fewer rows run together."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    what        it does
    operations  number of float32 multiplications that take as long
    """

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
    disk_bytes         most disk space that the search takes besides the output; it is freed at the end
    needed_bytes       disk space without which the search does not start: statistics, the output, and the download if the cache
                       is on the same disk
    free_bytes         free disk space
    download_bytes     size of the Hub models that are downloaded first
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
    download_bytes: int

    def report(self) -> Report:
        rate = sum(stage.operations for stage in self.stages) / self.processor_seconds
        download = f"{size(self.download_bytes)} into the cache, before anything is computed; only headers were read"
        facts: tuple[tuple[str, Value], ...] = (
            ("would write", str(self.out)),
            *((("download", download),) if self.download_bytes else ()),
            ("candidates", f"{self.candidates}, the base and the mean"),
            ("time", f"about {duration(self.processor_seconds / self.threads)} on {count(self.threads, 'thread')}"),
            ("CPU time", f"about {duration(self.processor_seconds)}"),
            ("memory", f"about {size(self.memory_bytes)}"),
            ("disk", f"at most {size(self.disk_bytes)} in addition to the output"),
            ("disk needed", f"{size(self.needed_bytes)} with the output; with less than the maximum, parts are recomputed"),
            ("disk free", size(self.free_bytes)),
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
            "download_bytes": self.download_bytes,
        }


@dataclass(frozen=True, slots=True)
class SearchSize:
    """What the cost of a search depends on, besides the models.

    models      number of fine-tunes
    tokens      of a row
    candidates  scored on all held-back rows, besides the base and the mean
    with_texts  whether texts are given
    kept_bytes  that may be kept of a candidate for the next one
    """

    models: int
    tokens: int
    candidates: int
    with_texts: bool
    kept_bytes: int


def plan_search(one: Opened, out: Path, use: DiskUse, search: SearchSize, resources: Resources) -> SearchPlan:
    """Count what a search does. one: the mean of the fine-tunes."""
    models, tokens, candidates = search.models, search.tokens, search.candidates
    rate, narrow = _rate("float32"), 1.0
    if fast_arithmetic(usable_device(resources.device)) == "bfloat16":
        narrow = rate / _rate("bfloat16")
    steps = one.model.steps
    linear = [step for step in steps if step.role == "linear" and len(step.out.shape) >= 2]
    layers = 2.0 * sum(step.out.size for step in linear)
    head = 2.0 * max((step.out.size for step in steps if step.role == "vocabulary"), default=0)
    scored = narrow * layers + LOSSES * head
    held = models * HELD_ROWS * tokens
    measured = models * (STATISTICS_ROWS if search.with_texts else OWN_ROWS) * tokens
    strengths = 4 * models * FEW_ROWS * tokens
    written = 0 if search.with_texts else models * (OWN_ROWS + HELD_ROWS) * tokens
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
    # What does not fit in half of the free space is computed again.
    vocabulary = max((step.out.shape[0] for step in steps if step.role == "vocabulary"), default=0)
    predictions = 4 * vocabulary * held
    factors = 8 * DIRECTIONS * models * sum(sum(step.out.shape[-2:]) for step in linear)
    kept = MATRICES * 8 * sum(step.out.size for step in linear) + factors + predictions + models * 2 * int(head)
    return SearchPlan(
        out,
        candidates,
        stages,
        operations / rate,
        resources.workers,
        memory_use(one, search, resources, remembers=kept <= DISK_SHARE * use.free),
        use.statistics + kept,
        use.needed,
        use.free,
        use.download,
    )


def memory_use(one: Opened, search: SearchSize, resources: Resources, *, remembers: bool) -> int:
    """The most bytes that the process holds, resident, in any stage: an estimate. Peaks of 0.84 to 1.23 times it were measured.

    one        the mean of the fine-tunes
    remembers  the disk has room for what the fine-tunes predict
    """
    steps, models, tokens = one.model.steps, search.models, search.tokens
    specs = {step.out.name: step.out for step in steps}
    linear = [step.out for step in steps if step.role == "linear" and len(step.out.shape) >= 2]
    *layers, outside = [[specs[name] for name in names] for names in parts_of(one.model.structure, one.base, steps)]
    layer_bytes = max(4 * sum(spec.size for spec in layer) for layer in layers)
    whole_bytes = 4 * sum(step.out.size for step in steps)
    held_bytes = whole_bytes
    if whole_bytes > search.kept_bytes // 2:  # one part at a time, see `MergedWeights`
        held_bytes = max(layer_bytes, 4 * sum(spec.size for spec in outside))
    vocabulary, width = max((step.out.shape for step in steps if step.role == "vocabulary"), default=(0, 0))
    head_bytes = 4 * vocabulary * width
    logits_bytes = 4 * vocabulary * max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // max(1, vocabulary)))
    features = max(sum(sum(spec.shape[-2:]) for spec in layer if len(spec.shape) > 1) for layer in layers)
    row_bytes = 4 * tokens * one.base.hidden
    held_bytes += row_bytes * HELD_ROWS * models  # what leaves the last layers of the fine-tunes
    running_bytes = 4 * BATCH_TOKENS * features
    # A layer is rounded to bfloat16 while it runs. A fine-tune's head predicts beside the candidate's, if the disk has no room.
    heads = 1 if remembers else 2
    scoring = layer_bytes // 2 + head_bytes + 3 * HELD_ROWS * row_bytes
    scoring += resources.workers * (running_bytes + heads * logits_bytes)
    statistics = layer_bytes + max(map(_sums_bytes, layers)) + 2 * STATISTICS_ROWS * row_bytes
    statistics += resources.workers * running_bytes
    # Sums, solutions and singular vectors of several matrices, as many as the scheduler lets begin.
    jobs = sorted((_job_bytes(spec.shape, models) for spec in linear), reverse=True) or [0]
    solving = max(jobs[0], min(sum(jobs[: resources.workers]), resources.resident_bytes))
    most_bytes = held_bytes + max(scoring, statistics, solving)
    if not search.with_texts:  # before anything is scored
        cached = sum(spec.shape[0] for spec in linear if spec.name.endswith((".k_proj.weight", ".v_proj.weight")))
        of_thread = ROWS_TOGETHER * (DRAWN_BYTES * vocabulary + 4 * tokens * cached)
        most_bytes = max(most_bytes, whole_bytes + resources.workers * of_thread)
    return PROCESS_BYTES + installed_bytes() + most_bytes


def _sums_bytes(layer: Sequence[TensorSpec]) -> int:
    """Memory of the second moments of a layer's linear layers: the sums, one that is divided, and the file that it goes to."""
    shapes = {spec.name: spec.shape for spec in layer}
    names = [name for name, shape in shapes.items() if len(shape) == 2]
    sums = [4 * math.prod(shape) for shape in shapes_of(find_statistic(KIND), names, shapes).values()]
    return min(sum(sums), WORK_BYTES) + 2 * max(sums, default=0)


def _job_bytes(shape: Sequence[int], models: int) -> int:
    """Memory of RegMean with tsv_m as its prior: float32 deltas, four float64 matrices of the weight's size, four squares, and
    the models' second moments, which are mapped from files. tsv_m alone takes less.
    """
    size, square = math.prod(shape[-2:]), shape[-1] ** 2
    return JOB_BYTES + (4 * models + 32) * size + (4 * models + 32) * square


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Disk space that a search needs, and how much is free. All in bytes.

    kept      statistics that an earlier call has finished
    download  Hub models that are downloaded into the cache
    cached    the same, if the cache is on the output's disk; otherwise 0
    """

    statistics: int
    kept: int
    output: int
    free: int
    download: int
    cached: int

    @property
    def needed(self) -> int:
        return self.searching + self.cached

    @property
    def searching(self) -> int:
        """Disk space that is needed after the download."""
        return max(self.statistics - self.kept, 0) + self.output


def disk_use(one: Opened, models: int, folder: Path, missing: Mapping[Path, int]) -> DiskUse:
    """What statistics, the output and a download take, and the free space of the output's disk.

    one      the mean of the fine-tunes
    models   fine-tunes
    folder   of unfinished work, beside the output
    missing  files to download, and their sizes; below 0: unknown
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
    output = sum(step.nbytes for step in one.prepared.plan.steps)
    sizes = {path: max(nbytes, 0) for path, nbytes in missing.items()}
    cached = sum(nbytes for path, nbytes in sizes.items() if _on_one_disk(path, folder))
    return DiskUse(statistics, kept, output, available_bytes(folder.parent), sum(sizes.values()), cached)


def _on_one_disk(path: Path, other: Path) -> bool:
    """Whether two places, or the nearest folders above them that exist, are on one file system."""
    first, second = (next(folder for folder in place.absolute().parents if folder.exists()) for place in (path, other))
    return first.stat().st_dev == second.stat().st_dev


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
