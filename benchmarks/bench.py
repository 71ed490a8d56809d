"""weightsmith, mergekit and the copy floor, side by side: `make bench`.

    python -m benchmarks.bench [--scale 1b] [--methods ties linear] [--runs 5] [--cold] [--skip-mergekit] [--json OUT]

For each merge, on a 1.1 B-parameter Llama and fine-tunes of it (models.py):

1. weightsmith and mergekit merge once, not timed, and their outputs are compared with a float64 reference (check.py).
   A wrong output of weightsmith ends the benchmark; mergekit's error is reported. This run also compiles the kernels.
2. Then each rival runs `--runs` times, interleaved, so that a slow minute of the machine hits all of them. Before each
   run all dirty pages are written back (`sync`), and the inputs brought into the page cache or (`--cold`) out of it.

Times are of the whole process, from its start to its end; only the floor is timed from inside, without Python's start.
GB/s counts the bytes that the merge must read and write once, whatever the rival really moved. Timings fail nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.jobs import JOBS, Job
from benchmarks.process import CacheState, Measured, cached_share, prepare_cache, run

MERGEKIT = Path("benchmarks/.venv-mergekit/bin/mergekit-yaml")
WORK = Path("build/bench")
RESULTS = Path("benchmarks/results")


# ---- rivals


@dataclass(frozen=True, slots=True)
class Models:
    """The synthetic models: where, how deep, and the bytes of one, and of the stack that passthrough makes of them."""

    folder: Path
    layers: int
    model_bytes: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class Task:
    """What every rival is asked to do: one job on one set of models."""

    job: Job
    recipe: Path
    inputs: tuple[Path, ...]
    read_bytes: int
    write_bytes: int
    threads: int

    @property
    def moved_bytes(self) -> int:
        """Bytes that must be read and written, each once."""
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True)
class Rival:
    """Something that can be timed.

    fsync   it waits until the output is on the disk
    merges  its output is a model that can be checked
    """

    name: str
    fsync: bool
    merges: bool = True

    def command(self, task: Task, out: Path) -> list[str]:
        """What to run."""
        raise NotImplementedError

    def seconds(self, measured: Measured) -> float:
        """The time that counts."""
        return measured.wall_seconds


class Floor(Rival):
    """Reads and writes, nothing else; says itself how long that took."""

    def command(self, task: Task, out: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "benchmarks.floor", "--threads", str(task.threads)),
            *("--read", *dict.fromkeys(str(file.parent) for file in task.inputs), "--read-bytes", str(task.read_bytes)),
            *("--write", str(out / "copy"), "--write-bytes", str(task.write_bytes)),
            *(["--fsync"] if self.fsync else []),
        ]

    def seconds(self, measured: Measured) -> float:
        return float(measured.output)


class Weightsmith(Rival):
    """The command line of the package in this environment."""

    def command(self, task: Task, out: Path) -> list[str]:
        program = str(Path(sys.executable).with_name("weightsmith"))
        options = ["--overwrite", "--quiet", "--threads", str(task.threads)]
        return [program, "merge", str(task.recipe), str(out), *options, *([] if self.fsync else ["--no-fsync"])]


@dataclass(frozen=True, slots=True)
class Mergekit(Rival):
    """mergekit's command line, from its own environment. It never waits for the disk."""

    program: Path = MERGEKIT

    def command(self, task: Task, out: Path) -> list[str]:
        options = ["--no-copy-tokenizer", "--quiet", "--num-threads", str(task.threads)]
        return [str(self.program), str(task.recipe), str(out), *options]

    def version(self) -> str:
        """Versions of mergekit and torch."""
        code = "import importlib.metadata as m; print('mergekit', m.version('mergekit'), 'torch', m.version('torch'))"
        return subprocess.check_output([self.program.with_name("python"), "-c", code], text=True).strip()


# ---- results


@dataclass(slots=True)
class Result:
    """All the timed runs of one rival at one job."""

    rival: Rival
    task: Task
    command: str
    runs: list[Measured] = field(default_factory=list)
    check: dict[str, Any] | None = None
    first_seconds: float | None = None

    @property
    def times(self) -> list[float]:
        """Seconds of each run."""
        return [self.rival.seconds(measured) for measured in self.runs]

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.times)

    @property
    def peak_rss_bytes(self) -> int:
        """The largest peak of all runs."""
        return max(measured.peak_rss_bytes for measured in self.runs)


def table(results: Sequence[Result]) -> Iterator[str]:
    """The results as lines of Markdown."""
    yield (
        "| merge | who | wall s: median (min to max) | GB/s | times as fast as mergekit | time / floor "
        "| CPU s | peak RSS MB | error |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for result in results:
        rivals = {other.rival.name: other for other in results if other.task.job is result.task.job}
        mergekit = rivals.get("mergekit")
        floor = rivals["floor, fsync" if result.rival.fsync else "floor"]
        cells = [
            result.task.job.name,
            result.rival.name,
            f"{result.median:.2f} ({min(result.times):.2f} to {max(result.times):.2f})",
            f"{result.task.moved_bytes / result.median / 1e9:.2f}",
            f"{mergekit.median / result.median:.1f}" if mergekit and result.rival.merges else "",
            f"{result.median / floor.median:.2f}",
            f"{statistics.median(m.cpu_seconds for m in result.runs):.1f}",
            f"{result.peak_rss_bytes / 1e6:.0f}",
            _error(result),
        ]
        yield f"| {' | '.join(cells)} |"


def _error(result: Result) -> str:
    check = result.check
    if check is None:
        return ""
    if result.task.job.name == "passthrough":
        return "equal bytes" if not check["off_share"] else f"{check['off_share']:.2%} of elements differ"
    if check["max_ulps"] is None:
        wrong = "" if not check["problems"] else f"; {len(check['problems'])} tensors are not what random masks give"
        return f"{check['off_share']:.2g} of the elements fit no mask{wrong}"
    return f"≤ {check['max_ulps']:.3g} ulp, {check['off_share']:.3%} over 1 ulp"


def as_json(result: Result) -> dict[str, Any]:
    """Everything measured."""
    return {
        "merge": result.task.job.name,
        "who": result.rival.name,
        "command": result.command,
        "seconds": result.times,
        "first_seconds": result.first_seconds,
        "cpu_seconds": [m.cpu_seconds for m in result.runs],
        "peak_rss_bytes": result.peak_rss_bytes,
        "read_bytes": result.task.read_bytes,
        "write_bytes": result.task.write_bytes,
        "check": result.check,
    }


# ---- running


def measure(
    task: Task, rivals: Sequence[Rival], models: Path, runs: int, mergekit_runs: int, cache: CacheState
) -> list[Result]:
    """Check, then time, every rival at one task; with mergekit_runs 0 the run that is checked is mergekit's only one."""
    results = []
    for rival in rivals:
        out = _out(rival)
        results.append(Result(rival, task, shlex.join(rival.command(task, out))))
        # weightsmith with and without fsync writes the same bytes; one check is enough.
        if rival.merges and not any(r.check and type(r.rival) is type(rival) for r in results):
            measured = _run_once(rival, task, out, cache)
            results[-1].first_seconds = measured.wall_seconds
            if isinstance(rival, Mergekit) and mergekit_runs == 0:
                results[-1].runs.append(measured)
            results[-1].check = _check(task.job.name, models, out, must_be_right=isinstance(rival, Weightsmith))
            _say(f"{task.job.name}: {rival.name}: first run {measured.wall_seconds:.2f} s, {_error(results[-1])}")
        shutil.rmtree(out, ignore_errors=True)
    for i in range(runs):
        for result in results:
            if isinstance(result.rival, Mergekit) and i >= mergekit_runs:
                continue
            out = _out(result.rival)
            result.runs.append(_run_once(result.rival, task, out, cache))
            shutil.rmtree(out, ignore_errors=True)
            _say(f"{task.job.name}: {result.rival.name}: run {i + 1} of {runs}: {result.times[-1]:.2f} s")
    return results


def _out(rival: Rival) -> Path:
    return WORK / "out" / rival.name.replace(",", "").replace(" ", "-")


def _run_once(rival: Rival, task: Task, out: Path, cache: CacheState) -> Measured:
    shutil.rmtree(out, ignore_errors=True)
    if not rival.merges:
        out.mkdir(parents=True)
    prepare_cache(task.inputs, cache)
    share = cached_share(task.inputs)
    if (share < 0.99) if cache == "warm" else (share > 0.01):
        _say(f"note: {share:.0%} of the inputs are in the page cache, this run should be {cache}")
    return run(rival.command(task, out), WORK / "log.txt")


def _check(method: str, models: Path, out: Path, *, must_be_right: bool) -> dict[str, Any]:
    # In a process of its own: see process.py on memory.
    command = [sys.executable, "-m", "benchmarks.check", method, str(models), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    findings: dict[str, Any] = json.loads(done.stdout)
    if findings["problems"] and must_be_right:
        raise SystemExit("\n".join([f"{method}: wrong output in {out}", *findings["problems"]]))
    return findings


def plan_task(job: Job, models: Models, threads: int) -> Task:
    """The task, with its recipe written and its bytes counted."""
    recipe = WORK / f"{job.name}.yml"
    recipe.write_text(job.recipe(models.folder.resolve(), models.layers), encoding="utf-8")
    inputs = tuple(file for name in job.inputs for file in sorted((models.folder / name).glob("*.safetensors")))
    if job.copies:
        return Task(job, recipe, inputs, models.stack_bytes, models.stack_bytes, threads)
    return Task(job, recipe, inputs, models.model_bytes * len(job.inputs), models.model_bytes, threads)


def build_models(scale: str) -> Models:
    """Build the models, in a process of its own: see process.py on memory."""
    command = [sys.executable, "-m", "benchmarks.models", "--scale", scale]
    fields = json.loads(subprocess.check_output(command, text=True))
    return Models(Path(fields.pop("folder")), **fields)


def machine() -> Iterator[str]:
    """What this was measured on."""
    models = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    cpu = models[0] if models else platform.machine()
    memory = next(int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    yield f"{os.cpu_count()} x {cpu}, {memory / 2**30:.0f} GiB, Linux {platform.release()}, {_file_system()}"
    yield f"Python {platform.python_version()}"
    yield subprocess.check_output([Path(sys.executable).with_name("weightsmith"), "--version"], text=True).strip()


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def _file_system() -> str:
    mounts = [line.split()[1:3] for line in _lines("/proc/mounts")]
    here = str(WORK.resolve())
    return max((m for m in mounts if here.startswith(m[0])), key=lambda m: len(m[0]))[1]


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Measure what was asked for, print it, keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="1b", help="a scale of models.py: toy, 1b, 2b or 7b")
    parser.add_argument("--methods", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mergekit-runs", type=int, default=5, help="at most; 0: only the run that is checked (minutes each)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cold", action="store_true", help="inputs out of the page cache (default: in it)")
    parser.add_argument("--skip-mergekit", action="store_true")
    parser.add_argument("--mergekit", type=Path, default=MERGEKIT, help="its mergekit-yaml")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    cache: CacheState = "cold" if args.cold else "warm"

    rivals: list[Rival] = [
        Floor("floor", fsync=False, merges=False),
        Floor("floor, fsync", fsync=True, merges=False),
        Weightsmith("weightsmith, no fsync", fsync=False),
        Weightsmith("weightsmith", fsync=True),
    ]
    about = [f"{datetime.now(UTC):%Y-%m-%d}", *machine()]
    if not args.skip_mergekit:
        mergekit = Mergekit("mergekit", fsync=False, program=args.mergekit)
        if not mergekit.program.exists():
            raise SystemExit(f"{mergekit.program} is missing: run `make mergekit`, or give --skip-mergekit")
        rivals.append(mergekit)
        about.append(mergekit.version())

    shutil.rmtree(WORK / "out", ignore_errors=True)  # what an interrupted benchmark left
    (WORK / "out").mkdir(parents=True)
    RESULTS.mkdir(exist_ok=True)
    _say(f"building the {args.scale} models, if they are not there")
    models = build_models(args.scale)

    results: list[Result] = []
    for name in args.methods:
        results += measure(
            plan_task(JOBS[name], models, args.threads), rivals, models.folder, args.runs, args.mergekit_runs, cache
        )

    lines = [
        f"# {args.scale}: page cache {cache}, {args.threads} threads, {args.runs} runs each"
        + ("" if args.skip_mergekit else f", mergekit {max(1, min(args.runs, args.mergekit_runs))}"),
        "",
        *(f"* {line}" for line in about),
        "",
        *table(results),
        "",
        f"The commands, here for {args.methods[0]}; the recipes are in benchmarks/jobs.py:",
        "",
        *(f"    {r.command}".replace(f"{Path.cwd()}/", "") for r in results if r.task.job.name == args.methods[0]),
    ]
    text = "\n".join(lines) + "\n"
    # Toy runs say nothing about speed; they are not kept with the results.
    out = (WORK if args.scale == "toy" else RESULTS) / f"{args.scale}-{cache}.md"
    out.write_text(text, encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps({"about": about, "results": [as_json(r) for r in results]}, indent=1))
    _say("\n" + text + f"\nwritten to {out}")


if __name__ == "__main__":
    main()
