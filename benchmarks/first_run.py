"""What the first merge with a method costs more than the second: kernels are compiled then.

    python -m benchmarks.first_run [--methods ties slerp] [--dtypes bfloat16 float16] [--before CHECKOUT]

Each merge of tiny models runs as a whole process, once with an empty cache of kernels and once with what that left there. The
difference of their processor times is what compiling costs; wall times include all imports. Another checkout is measured in
turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.bench import WORK
from benchmarks.methods import SETTINGS, Setting, recipe
from benchmarks.models import NAMES, Scale
from benchmarks.process import Measured, run
from weightsmith import save_model

TINY = Scale(64, 1, 128, 4, 2, 200, max_shard_bytes=10_000_000)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
MATRIX = ("tsv_m", "svc", "wudi", "star", "iso_c", "iso_cts", "resmerge", "cart")
EVERY = [*SETTINGS, "task_vectors", *MATRIX]


def build(dtype: str) -> Path:
    """The folder with the models, made anew."""
    folder = WORK / "tiny" / dtype
    shutil.rmtree(folder, ignore_errors=True)
    random = np.random.default_rng(0)
    base = {name: random.normal(0, 0.02, shape) for name, shape in TINY.shapes()}
    for model in NAMES:
        tuned = base if model == "base" else {name: x + random.normal(0, 3e-4, x.shape) for name, x in base.items()}
        save_model(
            {name: x.astype(DTYPES[dtype]) for name, x in tuned.items()},
            folder / model,
            config=TINY.config() | {"dtype": dtype},
        )
    return folder


def once(source: Path, task: Path, cache: Path) -> Measured:
    """One merge with the kernels in `cache`."""
    environment = [f"PYTHONPATH={source.resolve() / 'src'}", f"XDG_CACHE_HOME={cache.resolve()}"]
    command = ["env", "-u", "NUMBA_CACHE_DIR", *environment, sys.executable, "-m", "weightsmith", "merge"]
    out = WORK / "out" / "first"
    return run([*command, str(task), str(out), "--overwrite", "--quiet", "--no-fsync"], WORK / "log.txt")


def first_run(source: Path, task: Path) -> tuple[float, float, float]:
    """Processor time that compiling takes, wall time of the first run, and wall time of the second."""
    cache = WORK / "kernels"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    first, second = once(source, task, cache), once(source, task, cache)
    return first.cpu_seconds - second.cpu_seconds, first.wall_seconds, second.wall_seconds


def rows(methods: list[str], dtypes: list[str], sources: list[Path]) -> Iterator[str]:
    """The table, line by line; then the sums."""
    yield "| method | dtype | " + " | ".join("compiling, s | first run, s | second, s" for _ in sources) + " |"
    yield "| --- | --- |" + " ---: | ---: | ---: |" * len(sources)
    totals = [0.0] * len(sources)
    for dtype in dtypes:
        models = build(dtype)
        for method in methods:
            task = WORK / f"first-{method}-{dtype}.yml"
            text = recipe(method, SETTINGS.get(method, Setting()), models.resolve()).replace("bfloat16", dtype)
            task.write_text(text, encoding="utf-8")
            cells = []
            for i, source in enumerate(sources):
                compiling, first, second = first_run(source, task)
                totals[i] += compiling
                cells.append(f"{compiling:.1f} | {first:.1f} | {second:.1f}")
            yield f"| `{method}` | {dtype} | {' | '.join(cells)} |"
    yield f"| all | | {' | '.join(f'{total:.0f} | | ' for total in totals)} |"


def main() -> None:
    """Measure, print as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of another commit")
    parser.add_argument("--methods", nargs="+", choices=EVERY, default=EVERY)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    args = parser.parse_args()
    os.environ.pop("NUMBA_CACHE_DIR", None)
    WORK.mkdir(parents=True, exist_ok=True)
    sources = [*([args.before] if args.before else []), Path()]
    for line in rows(args.methods, args.dtypes, sources):
        print(line, flush=True)


if __name__ == "__main__":
    main()
