"""Quantising a model on the CPU, beside llm-compressor's `model_free_ptq`: seconds, peak memory, error of the weights.

    python benchmarks/quantize.py MODEL WORK [--peer /path/to/python]

MODEL is a folder in bfloat16, WORK a folder for outputs. The peer needs an environment of its own, with `pip install
llmcompressor`; without --peer only weightsmith is measured. Each run is a process of its own, once to compile and warm the
page cache, then timed. The error is ‖read back - original‖ / ‖original‖ over the weights that are quantised; both outputs are
read by weightsmith.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import weightsmith

FORMATS = {
    "fp8-dynamic": "FP8_DYNAMIC",
    "fp8-block": "FP8_BLOCK",
    "int8": "W8A8",
    "w4a16": "W4A16",
    "nvfp4a16": "NVFP4A16",
    "mxfp4": "MXFP4A16",
}
"""Ours → llm-compressor's scheme."""

_PEER = """
import sys
from llmcompressor import model_free_ptq
ignore = ["lm_head", "re:.*embed_tokens.*"]
options = {"scheme": sys.argv[3], "ignore": ignore, "device": "cpu", "max_workers": 2}
model_free_ptq(model_stub=sys.argv[1], save_directory=sys.argv[2], **options)
"""


class Failed(Exception):
    """A program did not finish."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--format", choices=list(FORMATS), help="this one alone")
    parser.add_argument("--peer", help="python of an environment with llm-compressor")
    args = parser.parse_args()
    print(f"{'format':12} {'program':15} {'seconds':>8} {'peak MB':>8} {'error':>8}")
    for name, scheme in FORMATS.items() if not args.format else [(args.format, FORMATS[args.format])]:
        out = args.work / name
        command = [sys.executable, "-m", "weightsmith", "quantize", str(args.model), str(out)]
        ours = [*command, "--format", name, "--overwrite", "--quiet", "--no-fsync"]
        run(ours)
        report(name, "weightsmith", *run(ours), args.model, out)
        if args.peer:
            theirs = args.work / f"{name}-peer"
            try:
                measured = run([args.peer, "-c", _PEER, str(args.model), str(theirs), scheme])
                report(name, "llm-compressor", *measured, args.model, theirs)
            except Failed as failed:
                print(f"{name:12} llm-compressor  {failed}", flush=True)


def run(command: list[str]) -> tuple[float, float]:
    """Seconds and peak memory in MB of a process. Raises Failed with the last line that it printed."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    text = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise Failed(text.strip().rpartition("\n")[2][:90])
    return time.monotonic() - began, usage.ru_maxrss / 1000


def report(name: str, program: str, seconds: float, peak_mb: float, model: Path, out: Path) -> None:
    """One row."""
    print(f"{name:12} {program:15} {seconds:8.2f} {peak_mb:8.0f} {error(model, out):8.4f}", flush=True)


def error(model: Path, out: Path) -> float:
    """The relative error of the weights that are quantised."""
    moved = norm = 0.0
    with weightsmith.open_checkpoint(model) as plain, weightsmith.open_checkpoint(out) as stored:
        for tensor in (name for name in plain.specs if stored.specs[name].dtype != plain.specs[name].dtype):
            before = plain.read(tensor).astype(np.float64)
            moved += ((stored.read(tensor) - before) ** 2).sum()
            norm += (before**2).sum()
    return float(np.sqrt(moved / norm))


if __name__ == "__main__":
    main()
