"""The demo's three adapters, merged as adapters: how well the base predicts with the result.

    python examples/adapter_merges.py            # needs the models of `make demo`, or makes them

Each recipe is merged in Core Space, at full and at smaller ranks, applied to the base, and judged on the held-out texts of all
four kinds. For comparison: the same recipe of whole models, `base+adapter`. The table goes to WORK/adapter_merges.md too.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

from judge import judge
from smollm2 import FINE_TUNES, build_base

import weightsmith

HERE = Path(__file__).resolve().parent
RECIPES: dict[str, tuple[str, dict[str, float], dict[str, Any]]] = {
    "task_arithmetic 0.6": ("task_arithmetic", {"weight": 0.6}, {}),
    "ties, density 0.5": ("ties", {"weight": 1.0, "density": 0.5}, {}),
    "tsv_m, lambda 0.8": ("tsv_m", {"weight": 1.0}, {"lambda": 0.8}),
}
RANKS = (None, 8)


def main() -> None:
    """Merge, apply, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder for models and results")
    parser.add_argument("--rows", type=int, default=None, help="rows of 384 tokens of each text; all if not given")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES), help="which ones")
    args = parser.parse_args()
    work: Path = args.work.resolve()
    base = build_base(work / "models")
    merged, applied = work / "merged-adapter", work / "merged-model"
    lines = ["| recipe | merged | seconds | perplexity (geometric mean) |", "| --- | --- | ---: | ---: |"]
    for label in args.recipes:
        method, own, shared = RECIPES[label]
        for rank in (0, *RANKS):
            prefix = "" if rank != 0 else f"{base}+"
            models = [{"model": f"{prefix}{HERE / 'testbed' / name}", "parameters": own} for name in FINE_TUNES]
            recipe = {"merge_method": method, "models": models, "parameters": shared, "dtype": "float32"}
            began = time.monotonic()
            if rank == 0:
                recipe |= {"base_model": str(base), "dtype": "bfloat16"}
                weightsmith.merge(recipe, applied, overwrite=True, progress=False)
            else:
                weightsmith.merge(recipe, merged, overwrite=True, progress=False, adapter_rank=rank)
            seconds = time.monotonic() - began
            if rank != 0:
                weightsmith.dequantize(f"{base}+{merged}", applied, overwrite=True, progress=False)
            what = "as models" if rank == 0 else f"as adapters, rank {rank or 24}"
            mean = judge(applied, HERE / "testbed" / "eval", "The", args.rows, new_tokens=1).mean
            lines.append(f"| {label} | {what} | {seconds:.1f} | {mean:.3f} |")
            print(lines[-1], flush=True)
            shutil.rmtree(applied)
    (work / "adapter_merges.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
