"""The options of runs: how a plan is carried out, and where the result goes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsmith._base.options import option, option_record
from weightsmith._files.remote import STREAM_CACHE_BYTES
from weightsmith._plans.parts import units_of

if TYPE_CHECKING:
    from weightsmith._engine.resources import Resources
    from weightsmith._planning.planner.prepared import Prepared
    from weightsmith.abc.output import Target

WRITING = ("merge", "moe", "plan", "quantize", "dequantize", "extract_lora", "convert_lora", "transplant_tokenizer", "run")
LOOKING = ("inspect", "diff", "preview", "evaluate", "tune")
RUNNING = (*WRITING, "evaluate", "statistics", "tune", "auto")


@option_record(*WRITING, group="Output")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a plan is run. These options do not affect the weights, but for rounding on another type of device."""

    threads: int | None = option(
        None,
        "--threads N",
        "Number of threads",
        unset="all available cores",
        least=1,
        commands=(*RUNNING, *LOOKING, "write"),
        group="Resources",
        setting=True,
    )
    max_memory_bytes: int | None = option(
        None,
        "--max-memory SIZE",
        "Memory limit, such as 500MB or 2GiB; does not affect the output",
        least=1,
        commands=RUNNING,
        group="Resources",
        setting=True,
    )
    overwrite: bool = option(
        False,
        "--overwrite",
        "Replace a checkpoint that weightsmith made",
        details="It stays until the new one is complete. A folder that has no manifest (`weightsmith.json`), has added or "
        "changed files, or is read, is never replaced: choose another name, or remove it yourself.",
        commands=(*WRITING, "statistics", "write", "auto"),
    )
    resume: bool = option(
        True, "--resume/--no-resume", "Resume an interrupted run of the same plan, or discard it", commands=RUNNING
    )
    fsync: bool = option(
        True,
        "--fsync/--no-fsync",
        "Flush the data to disk before OUT is created",
        commands=(*WRITING, "statistics", "auto"),
        group="Advanced",
    )
    card: bool = option(
        True,
        "--card/--no-card",
        "Write README.md, a model card",
        setting=True,
        brief=(),
    )
    report: str | None = option(
        None,
        "--report FILE",
        "Also write the result to a self-contained HTML file",
        path=True,
        details="Models, method, and distances by layer and part. `OUT/report.html` becomes part of the checkpoint, with "
        "pictures in its model card. See [reports](look.md#reports).",
    )
    allow_nonfinite: bool = option(
        False,
        "--allow-nonfinite",
        "Merge NaN and infinite values instead of failing",
        details="The error names model, tensor and element.",
        group="Advanced",
    )
    device: str = option(
        "cpu",
        "--device DEVICE",
        "Device for computation: cpu, cuda, cuda:1 or auto",
        details="It computes whole matrices and hidden states; everything else runs on the CPU.",
        commands=(*(command for command in RUNNING if command != "dequantize"), "write"),
        group="Resources",
        setting=True,
    )
    keep_stages: bool = option(
        False,
        "--keep-stages",
        "Keep results of recipes used as models, as OUT.stage-NAME",
        details="See [stages](recipe.md#stages).",
        commands=("merge", "moe", "plan"),
        group="Advanced",
    )
    stream: bool = option(
        False,
        "--stream",
        "Read Hub models over the network instead of downloading them",
        details="Only the needed byte ranges are read. See [remote models](remote.md).",
        commands=(*RUNNING, *LOOKING, "write"),
        group="Remote",
    )
    stream_cache_bytes: int = option(
        STREAM_CACHE_BYTES,
        "--stream-cache SIZE",
        "Disk space for streamed data; data that does not fit is fetched again",
        least=1,
        commands=RUNNING,
        group="Resources",
        setting=True,
        brief=(),
    )
    staging: str | None = option(
        None,
        "--staging FOLDER",
        "Keep files for a bucket or the Hub here until they are uploaded",
        details="The default is the current folder. A few weight files are there at a time.",
        path=True,
        commands=RUNNING,
        group="Resources",
        setting=True,
        brief=(),
    )
    evaluate: str | None = option(
        None,
        "--evaluate FILE",
        "Measure how well the result predicts this text",
        path=True,
        details="Before OUT is created: perplexity, and KL divergence from the source. The text is a txt, jsonl or parquet "
        "file, or `built-in`: [evaluating](evaluate.md#evaluate-while-merging-or-quantising).",
        commands=("merge", "moe", "quantize"),
    )
    push: str | None = option(
        None,
        "--push ORG/NAME[@BRANCH]",
        "Upload OUT to the Hub when it is complete",
        details="See [pushing](#pushing-to-the-hub).",
        group="Remote",
    )
    public: bool = option(
        False, "--public", "Create the Hub model as public; otherwise it is private", group="Remote", brief=()
    )
    commit_message: str | None = option(
        None,
        "--commit-message TEXT",
        "Commit message on the Hub",
        unset="the plan's title",
        group="Remote",
        brief=(),
    )
    ray: str | None = option(
        None,
        "--ray ADDRESS",
        "Ray cluster to run on: HOST:PORT, auto or local",
        details="`auto` is this machine's cluster, or a new one; `local` is a new one. Inputs and output are in a shared "
        "folder or a bucket: [several machines](scale.md).",
        group="Remote",
        brief=("run",),
    )


# ---- processes


THREADS = 16
"""The most threads of one process: 16 that take 2.4 ms a tile need 6,700 tiles a second, and one hands out up to 5,800."""
TILE_SECONDS = 175e-6
"""Processor time of the interpreter for a tile, with 16 to 64 threads that wake each other; 23e-6 with one thread."""
TENSOR_SECONDS = 95e-6
"""And for a tensor of one small tile."""
START_SECONDS = 1.4
"""To start a process: imports, kernels, the first tiles."""
OPEN_SECONDS = 48e-6
"""For each tensor, to open the plan and its models in a process."""
LEAST_GAIN = 2.0
"""Several processes are started to save so many times the seconds that starting them takes."""


def process_count(prepared: Prepared, out: Target, options: RunOptions) -> int:
    """How many processes a run is divided among; 1: this one does all.

    A run is divided if it has more than `THREADS` threads, is long enough, and reads and writes on this disk. Each process
    makes whole weight files, and takes the memory of a run: with a limit of the memory there is one. There is one, too, for
    a plan with products, which all parts wait for, on another device than the CPU, and for a method of the user's own.
    """
    from weightsmith._engine.resources import TILE_BYTES, processors

    plan, threads = prepared.plan, options.threads or processors()
    n = min(-(-threads // THREADS), threads)
    if n == 1 or os.name != "posix" or options.max_memory_bytes is not None or options.device != "cpu":
        return 1
    if not sys.executable or getattr(sys, "frozen", False):  # no interpreter that `-c` can be given to
        return 1
    if plan.then is not None or plan.products or prepared.stages or plan.provenance.code is not None:
        return 1
    if options.ray is not None or out.publication != "rename" or any(model.repositories for model in prepared.inputs):
        return 1
    n = min(n, len(units_of(plan)))
    tensors = len(plan.steps)
    tiles = sum(-(-step.nbytes // TILE_BYTES) for step in plan.steps)
    saved_seconds = (tiles * TILE_SECONDS + tensors * TENSOR_SECONDS) * (1 - 1 / n)
    return n if saved_seconds > LEAST_GAIN * (START_SECONDS + tensors * OPEN_SECONDS) else 1


# ---- memory


TENSOR_BYTES = 1_000
"""Memory for one tensor of an input or of the output: header, step, place, journal. With 60,000 of four models it is 0.8 kB."""
DECODED_BYTES = 2_500
"""And for one that is decoded: its codes, scales and shape have headers of their own. Plans took 1.5 kB (fp8), 2.3 (int4)."""


def tensors_bytes(prepared: Prepared) -> int:
    """Memory for the records of all tensors of a plan and its inputs."""
    inputs = [(len(model.specs), bool(model.decoded)) for model in prepared.inputs]
    decoded = sum(count for count, is_decoded in inputs if is_decoded)
    return TENSOR_BYTES * (len(prepared.plan.all_steps) + sum(count for count, _ in inputs)) + DECODED_BYTES * decoded


def resources_of(prepared: Prepared, options: RunOptions) -> Resources:
    """The engine's resources for a plan, by the options for threads (default: all available processors) and memory.

    Raises ParameterError for less memory than the plan needs.
    """
    from weightsmith._engine.resources import (
        ALIGNED_BYTES,
        RESIDENT_BYTES,
        Resources,
        fit_resident_bytes,
        fit_tile_bytes,
        processors,
    )

    threads, memory = options.threads or processors(), options.max_memory_bytes
    plan, records_bytes = prepared.plan, tensors_bytes(prepared)
    resident = fit_resident_bytes(memory, threads, plan.widest, RESIDENT_BYTES, plan.levels, tensors_bytes=records_bytes)
    return Resources(
        threads,
        fit_tile_bytes(memory, threads, plan.widest, plan.levels, tensors_bytes=records_bytes),
        resident,
        options.device,
        ALIGNED_BYTES if memory is None else 0,
        None if memory is None else resident,
        options.stream_cache_bytes,
    )
