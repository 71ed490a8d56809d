"""Extracting an adapter, beside mergekit-extract-lora: processor seconds, peak memory, share of the difference that is kept.

    python -m benchmarks.models --scale 1b --root FOLDER          # makes the models
    python -m benchmarks.extract FOLDER/1b WORK [--peer /path/to/mergekit-extract-lora] [--layers 2]

Each program runs in a process of its own, on one thread. `--layers N` extracts from the first N layers alone: the other program
takes minutes for each. The share kept, 1 - ‖difference - B A‖² / ‖difference‖², is computed here for both, from their files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

import weightsmith
from benchmarks.process import Measured, run

_SUFFIX = ".lora_A.weight"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder with the models `base` and `a`")
    parser.add_argument("work", type=Path, help="folder for outputs")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--layers", type=int, help="of the first layers only")
    parser.add_argument("--peer", help="mergekit-extract-lora of another environment")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    base, tuned = str(args.models / "base"), str(args.models / "a")
    pattern = rf"layers\.({'|'.join(map(str, range(args.layers)))})\." if args.layers else ""
    ours = [sys.executable, "-m", "weightsmith", "extract-lora", tuned, base, str(args.work / "weightsmith")]
    ours += ["--max-rank", str(args.rank), "--threads", "1", "--overwrite", "--quiet", "--no-fsync"]
    commands = {"weightsmith": [*ours, *(["--include", pattern, "--skip-undecomposable"] if pattern else [])]}
    if args.peer:
        theirs = [args.peer, "--model", tuned, "--base-model", base, "--out-path", str(args.work / "mergekit")]
        theirs += ["--max-rank", str(args.rank)]
        commands["mergekit"] = [*theirs, *(["--include-regex", pattern, "--skip-undecomposable"] if pattern else [])]
    print(f"{'program':12} {'CPU s':>8} {'peak MB':>8} {'kept':>8}", flush=True)
    for name, command in commands.items():
        measured: Measured = run(command, args.work / f"{name}.log")
        share = kept(args.work / name, base, tuned)
        print(f"{name:12} {measured.cpu_seconds:8.1f} {measured.peak_rss_bytes / 1e6:8.0f} {share:8.3%}", flush=True)


def kept(adapter: Path, base: str, tuned: str) -> float:
    """The share of the squared differences that an adapter keeps, of the matrices that it has factors of."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    lost = whole = 0.0
    with (
        weightsmith.open_checkpoint(adapter / "adapter_model.safetensors") as factors,
        weightsmith.open_checkpoint(base) as before,
        weightsmith.open_checkpoint(tuned) as after,
    ):
        for name in factors.specs:
            if name.endswith(_SUFFIX):
                weight = name.removeprefix("base_model.model.").removesuffix(_SUFFIX) + ".weight"
                difference = after.read(weight).astype(np.float32) - before.read(weight).astype(np.float32)
                a, b = (factors.read(key).astype(np.float32) for key in (name, name.replace("lora_A", "lora_B")))
                rest = difference - config["lora_alpha"] / config["r"] * (b @ a)
                whole += float(np.square(difference, dtype=np.float64).sum())
                lost += float(np.square(rest, dtype=np.float64).sum())
    return 1 - lost / whole


if __name__ == "__main__":
    main()
