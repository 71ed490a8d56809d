"""What the passes of a merge take inside the processor, without files and threads: nanoseconds for each element of the result.

    python -m benchmarks.kernels [--methods ties della] [--dtype bfloat16] [--runs 9] [--before CHECKOUT]

A matrix of 768 rows of 5632, with numbers as `benchmarks.models` makes them, in tiles of 1 MiB. Each tile's processor time is
the least of the runs, since other programs only add to it. `finite` and `distance` are what the engine does beside the job.
The last column is a digest of the result. Another checkout is measured in turn, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from benchmarks.methods import SETTINGS
from benchmarks.models import DELTA_STD, WEIGHT_STD
from weightsmith._base.tensors import DTYPES, grain_elements
from weightsmith._engine.resources import cut, tile_grains
from weightsmith._kernels.codecs import Encoded, first_nonfinite
from weightsmith._kernels.combine import distance
from weightsmith._methods import get
from weightsmith.abc.job import Matrix, Scratch, Tile

SHAPE = (768, 5632)
STORED = {
    "bfloat16": (DTYPES["BF16"], ml_dtypes.bfloat16),
    "float16": (DTYPES["F16"], np.float16),
    "float32": (DTYPES["F32"], np.float32),
}
METHODS = ("linear", "slerp", "nuslerp", "task_arithmetic", "ties", "dare_ties", "della", "arcee_fusion")


class Clock:
    """The least processor time of each piece of work."""

    def __init__(self) -> None:
        self.best: dict[tuple[str, int], float] = {}

    def time(self, what: str, i: int, work: Callable[..., Any], *args: Any) -> Any:
        """Call it; `what` and `i` name the piece."""
        began = time.thread_time()
        result = work(*args)
        self.best[what, i] = min(self.best.get((what, i), np.inf), time.thread_time() - began)
        return result

    def sums(self, elements: int) -> dict[str, float]:
        """ns an element, for each kind of work."""
        times = defaultdict[str, float](float)
        for (what, _), seconds in self.best.items():
            times[what] += seconds / elements * 1e9
        return {**times, "sum": sum(times.values())}


def inputs(dtype: str) -> list[np.ndarray]:
    """The bytes of a base and of two fine-tunes of it: uint8 each."""
    random, kind = np.random.Generator(np.random.SFC64(0)), STORED[dtype][1]
    base = (random.standard_normal(SHAPE, np.float32) * np.float32(WEIGHT_STD)).astype(kind)
    deltas = [random.standard_normal(SHAPE, np.float32) * np.float32(DELTA_STD) for _ in range(2)]
    tuned = [(base.astype(np.float32) + delta).astype(kind) for delta in deltas]
    return [x.reshape(-1).view(np.uint8) for x in (base, *tuned)]


def make_matrix(name: str, dtype: str) -> Matrix:
    """The matrix, as the engine describes it to the method's job."""
    setting, method, code = SETTINGS[name], get(name), STORED[dtype][0].code
    base = method.base == "required"
    count = len(setting.models) + (setting.base == "base")
    shared = {p.name: p.default for p in method.parameters if p.scope == "tensor" and p.default is not None}
    parameters = {p.name: p.default for p in method.parameters if p.scope == "model" and p.default is not None} | dict(
        setting.parameters
    )
    return Matrix(
        name="w",
        size=SHAPE[0] * SHAPE[1],
        cols=SHAPE[1],
        grain=grain_elements(SHAPE),
        codes=np.full(count, code),
        out_code=code,
        base=base,
        shared=shared | dict(setting.shared),
        models=tuple({} if base and i == 0 else parameters for i in range(count)),
        seed=0,
        inputs=tuple(range(count)),
        places=tuple(range(count)),
        shape=SHAPE,
    )


def measure(name: str, dtype: str, runs: int) -> dict[str, Any]:
    """ns an element by pass, and the digest of the result."""
    stored, matrix, clock, scratch = STORED[dtype][0], make_matrix(name, dtype), Clock(), Scratch()
    raw = inputs(dtype)[0 if SETTINGS[name].base else 1 :][: len(matrix.codes)]
    places, width = cut(matrix.size, matrix.grain, tile_grains(matrix.grain, [stored])), stored.itemsize
    tiles = [
        Tile(p.start, p.size, np.stack([x[p.start * width : (p.start + p.size) * width] for x in raw]), scratch) for p in places
    ]
    out = np.empty(matrix.size * width, np.uint8)
    rows, sums = scratch.rows(2, matrix.codes, stored.code).copy(), np.empty((2, 2048))
    for run in range(runs + 1):
        job, number = get(name).job(matrix), 0
        while number < job.passes():
            results = [clock.time(f"pass {number + 1}", i, job.statistics, number, tile) for i, tile in enumerate(tiles)]
            clock.time("finish", number, job.finish_pass, number, results)
            number += 1
        for i, tile in enumerate(tiles):
            data = out[tile.start * width : (tile.start + tile.size) * width]
            clock.time("apply", i, job.apply, tile, data)
            for k, held in enumerate(tile.raw):
                clock.time("finite", i * len(tile.raw) + k, first_nonfinite, held, stored.code, tile.size)
            if SETTINGS[name].base:
                totals = np.empty((tile.grains(matrix.grain), 2))
                both = Encoded(tile.raw[0], stored.code), Encoded(data, stored.code)
                clock.time("distance", i, distance, *both, tile.size, matrix.grain, totals, rows, sums)
        if run == 0:  # compiled then
            clock.best.clear()
    return clock.sums(matrix.size) | {"digest": xxhash.xxh3_64_hexdigest(out.tobytes())}


def main() -> None:
    """Measure, print as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--dtype", choices=STORED, default="bfloat16")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--before", type=Path, help="a checkout of another commit")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure(args.methods[0], args.dtype, args.runs)))
        return
    for name in args.methods:
        for folder in [*([args.before] if args.before else []), Path()]:
            command = [sys.executable, "-m", "benchmarks.kernels", "--json", "--methods", name, "--dtype", args.dtype]
            environment = {**os.environ, "PYTHONPATH": f"{folder.resolve() / 'src'}:{Path().resolve()}"}
            command += ["--runs", str(args.runs)]
            times = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)
            shown = "  ".join(f"{what} {ns:.2f}" for what, ns in times.items() if what != "digest")
            print(f"{name:16} {folder!s:>12}  {shown}  {times['digest']}", flush=True)


if __name__ == "__main__":
    main()
