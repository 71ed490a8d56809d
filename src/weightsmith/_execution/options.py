"""The options of runs: how a plan is carried out, and where the result goes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsmith._base.errors import NOTHING_WRITTEN, ParameterError
from weightsmith._base.options import named, option, option_record
from weightsmith._files.remote import STREAM_CACHE_BYTES

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
    processes: int = option(
        1,
        "--processes N",
        "Number of processes that share the threads",
        least=1,
        details="For more than 8 threads, if the models are in memory or on storage of more than 10 GB/s: "
        "[many cores](scale.md#one-machine-with-many-cores).",
        group="Resources",
        brief=("run",),
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
    local_copy: str | None = option(
        None,
        "--local-copy FOLDER",
        "Read copies of inputs from this folder, on the machine's own disk",
        details="`FOLDER/base/model.safetensors` is read instead of that file of the model `base`, if it is an equal one: "
        "[local copies](scale.md#local-copies).",
        path=True,
        group="Resources",
        brief=("run",),
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


def check_processes(prepared: Prepared, out: Target, options: RunOptions) -> int:
    """How many processes a run is divided among. Raises ParameterError if that is several, and the run cannot be divided."""
    from weightsmith._engine.products import divisible, has_tasks
    from weightsmith._engine.resources import processors
    from weightsmith._planning.follow_ups import follow_up_kind

    plan, threads = prepared.plan, options.threads or processors()
    if options.processes == 1:
        return 1
    reasons = {
        "this system has no locks of files": os.name != "posix",
        "this program has no interpreter of its own": not sys.executable or getattr(sys, "frozen", False),
        "--ray starts processes itself": options.ray is not None,
        "--max-memory is for one process": options.max_memory_bytes is not None,
        "several processes compute on the CPU": options.device != "cpu",
        "one process writes a bucket, or to the Hub": out.publication != "rename",
        "models that are streamed have one reader": any(model.repositories for model in prepared.inputs),
        "a recipe whose models are results of other recipes has one process": bool(prepared.stages),
        "the plan has products that one process makes, and tensors that wait for them": not (
            all(map(divisible, plan.products)) if plan.then is None else follow_up_kind(prepared).divisible
        )
        and not has_tasks(plan),
        "a merge method of your own runs in one process": plan.provenance.code is not None,
        f"there are fewer threads: {threads}": options.processes > threads,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ParameterError(reason, where=named("processes"), fix="leave --processes out", state=NOTHING_WRITTEN)
    return options.processes


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
        Resources,
        fit_resident_bytes,
        fit_tile_bytes,
        processors,
    )

    threads, memory = options.threads or processors(), options.max_memory_bytes
    plan, records_bytes = prepared.plan, tensors_bytes(prepared)
    resident = fit_resident_bytes(memory, threads, plan.widest, plan.levels, tensors_bytes=records_bytes)
    return Resources(
        threads,
        fit_tile_bytes(memory, threads, plan.widest, plan.levels, tensors_bytes=records_bytes),
        resident,
        options.device,
        ALIGNED_BYTES if memory is None else 0,
        None if memory is None else resident,
        options.stream_cache_bytes,
    )
