"""A merge by a Ray cluster on this machine beside the same merge in one process: what sharing it out costs.

    pip install 'weightsmith[ray]'
    python -m benchmarks.cluster --scale 1b [--jobs ties] [--runs 3]

`ray` starts a cluster and ends it, and does nothing with it. The outputs are compared first: they are equal, byte for byte.
Times are of whole processes, which do not wait for the disk; the inputs are in the page cache. On one machine nothing can be
gained.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from pathlib import Path

from benchmarks.bench import WORK
from benchmarks.jobs import JOBS, Job
from benchmarks.models import ROOT, SCALES, build
from benchmarks.process import check_same, in_turn, run

_START = """
import logging, os
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
ray.init("local", log_to_driver=False, logging_level=logging.ERROR)
ray.shutdown()
"""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="1b")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["ties"])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    folder = build(args.scale, args.root)
    print("| merge | one process s | ray s | by ray s | (by ray - ray) / one process |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in args.jobs:
        print(measure(JOBS[name], folder, args.runs), flush=True)


def measure(job: Job, folder: Path, runs: int) -> str:
    """A row: medians of `runs` runs, the three in turn. Raises SystemExit if the outputs differ."""
    work = WORK / "cluster"
    work.mkdir(parents=True, exist_ok=True)
    inputs = [file for model in job.inputs for file in sorted((folder / model).glob("*.safetensors"))]
    recipe = work / "recipe.yml"
    recipe.write_text(job.recipe(folder.absolute(), SCALES[folder.name].layers), encoding="utf-8")
    merge = [sys.executable, "-m", "weightsmith", "merge", str(recipe), "--overwrite", "--quiet", "--no-fsync"]
    rivals = {
        "one": [*merge, str(work / "one")],
        "ray": [sys.executable, "-c", _START],
        "by ray": [*merge, str(work / "ray"), "--ray", "local"],
    }
    for command in rivals.values():
        run(command, work / "log")
    check_same(work / "one", work / "ray")
    done = in_turn(rivals, runs, inputs, work / "log")
    shutil.rmtree(work)
    wall = {name: statistics.median(run.wall_seconds for run in runs) for name, runs in done.items()}
    share = (wall["by ray"] - wall["ray"]) / wall["one"]
    return f"| {job.name} | {wall['one']:.2f} | {wall['ray']:.2f} | {wall['by ray']:.2f} | {share:.2f} |"


if __name__ == "__main__":
    main()
