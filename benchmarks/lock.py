"""How many threads can one interpreter feed? The time that a tile holds Python's lock, and what several processes could gain.

    python -m benchmarks.lock          # the table of docs/scale.md; a minute, 100 MB in memory

For each method, in this process:

* lock: processor µs of a tile of 2,048 elements, with one thread, and with reads and writes that do nothing. The kernels'
  share of that is about a microsecond, so it is time with the lock.
* tile: processor µs of a tile with 1 MiB of each input, with one thread, from and to files in memory.
* handed out: tiles a second, if many threads wait for their data most of the time, so that they need little besides the
  lock. It includes handing the lock over. The best of several short runs; other work on the machine lowers it.

The lock is busy all the time at `tile / lock` threads at most, and at `tile * handed out` threads at least.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import weightsmith
from weightsmith._base import tensors
from weightsmith._engine import local, reader, resources

METHODS = ("passthrough", "linear", "slerp", "ties")
GRAIN = 2048
"""Elements of a small tile: its kernels take about a microsecond."""
WAIT_SECONDS = 2e-3
"""How long a read takes, where many threads wait for their data."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: its tiles, the bytes that they read and wrote, its CPU time and its wall time."""

    tiles: int
    nbytes: int
    cpu_seconds: float
    seconds: float


def write_models(folder: Path, n_tensors: int, shape: tuple[int, int]) -> None:
    """Three models, float16: random numbers, the same in each tensor."""
    rng = np.random.default_rng(0)
    for name in "abc":
        numbers = (rng.standard_normal(shape) * 0.02).astype(np.float16)
        model = {f"model.layers.{i}.w.weight": numbers for i in range(n_tensors)}
        weightsmith.save_model(model, folder / name, config={"model_type": "x"}, fsync=False)


def recipe(method: str, folder: Path) -> dict[str, Any]:
    """A recipe of a method, for these models."""
    a, b, c = (str(folder / name) for name in "abc")
    match method:
        case "passthrough":
            return {"merge_method": method, "models": [{"model": a}]}
        case "linear":
            return {"merge_method": method, "models": [{"model": m} for m in (a, b)], "parameters": {"weight": 0.5}}
        case "slerp":
            return {"merge_method": method, "base_model": a, "models": [{"model": m} for m in (a, b)], "parameters": {"t": 0.5}}
        case _:
            models = [{"model": m} for m in (b, c)]
            return {"merge_method": method, "base_model": a, "models": models, "parameters": {"weight": 1, "density": 0.5}}


@contextmanager
def small_tiles() -> Iterator[None]:
    """Tiles of 2,048 elements."""
    with mock.patch.multiple(resources, TILE_BYTES=2 * GRAIN, MIN_TILE_BYTES=2 * GRAIN):
        with mock.patch.object(tensors, "GRAIN_ELEMENTS", GRAIN), mock.patch.object(reader, "TILE_BYTES", 2 * GRAIN):
            yield


@contextmanager
def no_files(wait_seconds: float = 0.0) -> Iterator[None]:
    """Reads that fill memory with a number and writes that do nothing; each waits so long, without the lock."""
    data = bytes(range(1, 65)) * 1024

    def read(fd: int, buffers: list[Any], offset: int) -> int:
        if wait_seconds:
            time.sleep(wait_seconds)
        for buffer in buffers:
            buffer[:] = memoryview(data)[: len(buffer)] if isinstance(buffer, memoryview) else data[: len(buffer)]
        return sum(map(len, buffers))

    def write(fd: int, data: Any, offset: int) -> int:
        return len(data)

    with mock.patch.object(os, "preadv", read), mock.patch.object(os, "pwrite", write):
        yield


def measured(models: Path, method: str, threads: int = 1, stubbed: AbstractContextManager[None] | None = None) -> Measured:
    """A merge, of which the work on tiles is measured. stubbed: what reads and writes are replaced by meanwhile."""
    go, do, tiles, results = local.Run.go, local.Run._do, [0], list[Measured]()

    def count(self: local.Run, task: Any, buffers: Any) -> Any:
        tiles[0] += 1
        return do(self, task, buffers)

    def timed(self: local.Run, report: Any = None) -> None:
        with stubbed or nullcontext():
            cpu_seconds, began = time.process_time(), time.perf_counter()
            go(self)
            cpu_seconds, seconds = time.process_time() - cpu_seconds, time.perf_counter() - began
            results.append(Measured(tiles[0], self.read_bytes + self.written_bytes, cpu_seconds, seconds))

    out = models / "out"
    quiet: dict[str, Any] = {"fsync": False, "check_loading": False, "progress": False, "card": False}
    with mock.patch.object(local.Run, "go", timed), mock.patch.object(local.Run, "_do", count):
        weightsmith.merge(recipe(method, models), out, threads=threads, **quiet)
    shutil.rmtree(out)
    return results[-1]


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=128, help="that wait for their data")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        write_models(small, 16, (512, 1024))
        write_models(large, 8, (2048, 1024))
        print("| method | lock, µs | tile, µs | handed out | GB/s of that | threads, at least | at most |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for method in options.methods:
            with small_tiles():
                measured(small, method, stubbed=no_files())  # compiles
                alone = [measured(small, method, stubbed=no_files()) for _ in range(options.runs)]
                many = [measured(small, method, options.threads, no_files(WAIT_SECONDS)) for _ in range(options.runs)]
            whole = [measured(large, method) for _ in range(options.runs)]
            lock = statistics.median(run.cpu_seconds / run.tiles for run in alone)
            tile = statistics.median(run.cpu_seconds / run.tiles for run in whole)
            rate = max(run.tiles / run.seconds for run in many)
            moved = rate * whole[0].nbytes / whole[0].tiles
            print(
                f"| {method} | {lock * 1e6:.0f} | {tile * 1e6:,.0f} | {rate:,.0f} | {moved / 1e9:.0f} | {rate * tile:.0f} "
                f"| {tile / lock:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
