"""Merges whose inputs and outputs are in memory, over a plain copy: what the processor takes.

    python -m benchmarks.memory [--scale 1b] [--runs 5] [--methods ties slerp] [--before CHECKOUT] [--root /dev/shm/weightsmith]

Models and outputs are on a tmpfs: 11 GB for `1b`, 1.7 GB for `300m`. For each method the copy and the merge run in turn,
`tiny` is a merge of two models of 60 kB, and `plan` plans it. Seconds by the clock are of whole processes, Python's start
and all, but for the copy; processor seconds are user and system time. Each figure is the smallest of the runs: others who
use the machine only add to it. Another checkout is measured in turn. Status 1 if its outputs have other bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import bench, first_run, methods, models
from benchmarks.bench import Floor, Models, Rival, Task, machine
from benchmarks.pairs import Checkout, digest
from benchmarks.process import Measured, run

METHODS = ("passthrough", "linear", "slerp", "task_arithmetic", "ties", "dare_ties", "della", "arcee_fusion")
TINY = ("tiny", "plan")


@dataclass(frozen=True, slots=True)
class ProcessorFloor(Floor):
    """The copy, by processor seconds."""

    def command(self, task: Task, out: Path) -> list[str]:
        return [*Floor.command(self, task, out), "--processor"]


@dataclass(frozen=True, slots=True)
class Planner(Checkout):
    """`weightsmith plan` of a checkout."""

    def command(self, task: Task, out: Path) -> list[str]:
        python = ["env", f"PYTHONPATH={self.folder.resolve() / 'src'}", sys.executable, "-m", "weightsmith"]
        return [*python, "plan", str(task.recipe)]


def once(rival: Rival, task: Task, out: Path) -> Measured:
    """One run, its output left in place."""
    shutil.rmtree(out, ignore_errors=True)
    if not rival.merges:
        out.mkdir(parents=True)
    return run(rival.command(task, out), out.with_suffix(".log"))


def least(runs: list[Measured], field: str) -> float:
    """The smallest value of a field."""
    return min(float(getattr(run, field)) for run in runs)


def rows(args: argparse.Namespace) -> Iterator[str]:
    """The table, line by line."""
    folders = [*([args.before] if args.before else []), Path()]
    names = ["before", "after"][-len(folders) :] if args.before else [""]
    heads = [f"{name} {what}".strip() for name in names for what in ("s", "processor s", "/ copy", "ns an element", "MB")]
    yield f"| merge | copy s | processor s | {' | '.join(heads)} |"
    yield "| --- |" + " ---: |" * (2 + len(heads))
    source = models.SCALES[args.scale]
    large = Models(models.build(args.scale, args.root), source.layers, source.nbytes, source.nbytes)
    for method in args.methods:
        tiny = method in TINY
        task = _tiny(args) if tiny else methods.make_task(method, large, args.threads)
        kind = Planner if method == "plan" else Checkout
        programs = [kind(str(folder), fsync=False, folder=folder) for folder in folders]
        floors: list[Rival] = (
            [] if tiny else [Floor("floor", fsync=False, merges=False), ProcessorFloor("floor", fsync=False, merges=False)]
        )
        digests = set()
        for program in programs:  # compiles kernels too
            once(program, task, args.root / "out")
            digests.add(digest(args.root / "out"))
        if len(digests) > 1:
            raise SystemExit(f"{method}: the bytes differ")
        runs: list[list[Measured]] = [[] for _ in programs]
        copies: list[list[float]] = [[] for _ in floors]
        for _ in range(args.runs):
            for i, floor in enumerate(floors):
                copies[i].append(floor.seconds(once(floor, task, args.root / "copy")))
            shutil.rmtree(args.root / "copy", ignore_errors=True)
            for i, program in enumerate(programs):
                runs[i].append(once(program, task, args.root / "out"))
        copy = [min(seconds) for seconds in copies]
        cells = [method, *(f"{seconds:.2f}" for seconds in copy or ())] + ["", ""] * (not copy)
        for program_runs in runs:
            wall, cpu = least(program_runs, "wall_seconds"), least(program_runs, "cpu_seconds")
            ratio = f"{wall / copy[0]:.2f}, {cpu / copy[1]:.2f}" if copy else ""
            ns = f"{cpu / (source.nbytes / 2) * 1e9:.2f}" if copy else ""
            cells += [f"{wall:.2f}", f"{cpu:.2f}", ratio, ns, f"{least(program_runs, 'peak_rss_bytes') / 1e6:.0f}"]
        yield f"| {' | '.join(cells)} |"


def _tiny(args: argparse.Namespace) -> Task:
    folder = first_run.build("bfloat16")
    return methods.make_task("linear", Models(folder, 1, 1, 1), args.threads)


def main() -> None:
    """Measure, print as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=[*methods.SETTINGS, *TINY], default=[*METHODS, *TINY])
    parser.add_argument("--scale", choices=models.SCALES, default="1b")
    parser.add_argument("--root", type=Path, default=Path("/dev/shm/weightsmith"))
    parser.add_argument("--before", type=Path, help="a checkout of another commit")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a program that is installed has compiled modules
    bench.WORK.mkdir(parents=True, exist_ok=True)
    args.root.mkdir(parents=True, exist_ok=True)
    print("\n".join(f"* {line}" for line in machine()), "", sep="\n")
    for line in rows(args):
        print(line, flush=True)
    shutil.rmtree(args.root / "out", ignore_errors=True)


if __name__ == "__main__":
    main()
