"""`inspect`, `diff` and `preview` beside what it takes to read their models, and beside modeldelta.

    python -m benchmarks.look --scale 1b [--peer /path/to/python] [--runs 3]

Each command is a process of its own, run once to compile kernels and warm the page cache, and then timed: user and system CPU
seconds, which other work on the machine changes less than wall time, and the peak of resident memory. `read` reads both models
into one buffer; `load` is safetensors' load_file of both, into numpy. The norms that `diff` prints are compared with numpy's in
float64 first. The peer is `modeldelta A B` in an environment of its own; without --peer it is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.models import ROOT, SCALES, build
from benchmarks.process import Measured, run
from weightsmith._models.checkpoint import open_checkpoint

_READ = """
import sys
from weightsmith._models.checkpoint import open_checkpoint
buffer = bytearray(1 << 20)
for folder in sys.argv[1:]:
    with open_checkpoint(folder) as model:
        for name, spec in model.specs.items():
            for start in range(0, spec.nbytes, len(buffer)):
                model.read_into(name, start, memoryview(buffer)[: min(len(buffer), spec.nbytes - start)])
"""

_LOAD = """
import ml_dtypes, pathlib, sys  # without ml_dtypes, numpy has no bfloat16
from safetensors.numpy import load_file
print(len([load_file(file) for folder in sys.argv[1:] for file in sorted(pathlib.Path(folder).glob("*.safetensors"))]))
"""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="1b")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", help="python of an environment with modeldelta")
    args = parser.parse_args()
    folder = build(args.scale, args.root)
    with tempfile.TemporaryDirectory() as work:
        for name, command in commands(folder, Path(work), args.peer).items():
            log = Path(work) / "log"
            first = run(command, log)
            if name == "diff":
                check(json.loads(first.output.partition("\n")[0]), folder)
            show(name, [run(command, log) for _ in range(args.runs)])


def commands(folder: Path, work: Path, peer: str | None) -> dict[str, list[str]]:
    """What is measured, by name."""
    base, *tuned = (str(folder / name) for name in ("base", "a", "b", "c"))
    recipe = work / "ties.yml"
    models = "".join(f"  - model: {model}\n    parameters: {{weight: 1, density: 0.5}}\n" for model in tuned)
    recipe.write_text(f"merge_method: ties\nbase_model: {base}\nmodels:\n{models}dtype: bfloat16\n")
    ours = [sys.executable, "-m", "weightsmith"]
    quiet = ["--json", "--quiet"]
    programs = {
        "read": [sys.executable, "-c", _READ, base, tuned[0]],
        "load": [sys.executable, "-c", _LOAD, base, tuned[0]],
        "inspect": [*ours, "inspect", base, *quiet],
        "inspect --stats": [*ours, "inspect", base, "--stats", *quiet],
        "diff": [*ours, "diff", base, tuned[0], *quiet],
        "diff --base": [*ours, "diff", "--base", base, *tuned, *quiet],
        "preview": [*ours, "preview", str(recipe), *quiet],
    }
    if peer:
        programs["modeldelta"] = [str(Path(peer).parent / "modeldelta"), base, tuned[0], "--quiet"]
    return programs


def check(report: dict[str, object], folder: Path) -> None:
    """The norms of some small tensors are numpy's in float64."""
    tensors = report["tensors"]
    assert isinstance(tensors, list)
    with open_checkpoint(folder / "base") as a, open_checkpoint(folder / "a") as b:
        for tensor in [tensor for tensor in tensors if tensor["elements"] < 1 << 20][
            :8
        ]:  # this process's memory counts into theirs
            before, after = (model.read(tensor["name"]).astype(np.float64) for model in (a, b))
            expected = float(np.linalg.norm(after - before)), float(np.linalg.norm(before))
            if not np.allclose((tensor["delta_norm"], tensor["a_norm"]), expected, rtol=1e-9):
                raise SystemExit(f"{tensor['name']}: {tensor['delta_norm']}, {tensor['a_norm']}, and numpy has {expected}")


def show(name: str, runs: list[Measured]) -> None:
    """One row: the median and the range of CPU seconds, wall seconds, peak memory."""
    cpu = sorted(run.cpu_seconds for run in runs)
    wall, peak = min(run.wall_seconds for run in runs), max(run.peak_rss_bytes for run in runs)
    spread = f"{statistics.median(cpu):7.2f} s CPU ({cpu[0]:.2f} to {cpu[-1]:.2f})"
    print(f"{name:16}{spread}  {wall:7.2f} s wall at least  {peak / 1e6:6.0f} MB", flush=True)


if __name__ == "__main__":
    main()
