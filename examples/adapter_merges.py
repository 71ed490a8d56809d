"""The demo's three adapters, merged as adapters: how well the base predicts with the result.

    python examples/adapter_merges.py            # needs the models of `make demo`, or makes them

Each recipe is merged as adapters (in each space, at full and at smaller ranks, and as PEFT combines them), applied to the base,
and judged on the held-out texts of all four kinds. For comparison: the base, the single adapters, and the same recipes of whole
models, `base+adapter`. The table goes to WORK/adapter_merges.md too.
"""

from __future__ import annotations

import argparse
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from judge import DOMAINS, judge
from smollm2 import FINE_TUNES, build_base

import weightsmith

HERE = Path(__file__).resolve().parent
FULL_RANK = 8 * len(FINE_TUNES)
RECIPES: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "task_arithmetic": ({"weight": 0.6}, {}),
    "ties": ({"weight": 1.0, "density": 0.5}, {}),
    "tsv_m": ({"weight": 1.0}, {"lambda": 0.8}),
    "peft_linear": ({"weight": 0.6}, {}),
    "peft_ties": ({"weight": 1.0}, {"density": 0.5}),
    "peft_ties_svd": ({"weight": 1.0}, {"density": 0.5}),
    "peft_svd": ({"weight": 0.6}, {}),
}
"""Method → parameters of each model, and of all."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to merge. rank 0: as models."""

    method: str
    rank: int = 0
    space: str = "core"

    @property
    def label(self) -> str:
        """For the table."""
        if not self.rank:
            return f"| `{self.method}` | models |"
        where = "" if self.method.startswith("peft_") else f", {self.space}"
        return f"| `{self.method}` | adapters{where}, rank {self.rank} |"


def rows() -> Iterator[Row]:
    """All of them."""
    for method in ("task_arithmetic", "ties", "tsv_m"):
        yield Row(method)
        for rank in (FULL_RANK, 16, 8):
            yield Row(method, rank)
    yield from (Row("ties", rank, "knots") for rank in (FULL_RANK, 8))
    yield from (Row(method, rank, "compressed") for method in ("task_arithmetic", "ties", "tsv_m") for rank in (16, 8))
    yield from (Row(method, 8) for method in ("peft_linear", "peft_ties", "peft_svd", "peft_ties_svd"))


def main() -> None:
    """Merge, apply, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder for models and results")
    parser.add_argument("--rows", type=int, default=None, help="rows of 384 tokens of each text; all if not given")
    parser.add_argument("--methods", nargs="+", default=list(RECIPES), choices=list(RECIPES), help="which ones")
    args = parser.parse_args()
    work: Path = args.work.resolve()
    base, out = build_base(work / "models"), work / "adapter_merges.md"
    applied = work / "merged-model"
    lines = [f"| recipe | merged as | {' | '.join(DOMAINS)} | geometric mean | CPU seconds |", "| --- | --- |" + " ---: |" * 6]

    def judged(folder: Path, label: str, seconds: str) -> None:
        judgement = judge(folder, HERE / "testbed" / "eval", "The", args.rows, new_tokens=1)
        cells = " | ".join(f"{judgement.perplexity[domain]:.3f}" for domain in DOMAINS)
        lines.append(f"{label} {cells} | {judgement.mean:.3f} | {seconds} |")
        print(lines[-1], flush=True)
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")

    judged(base, "| the base | |", "")
    for name in FINE_TUNES:
        weightsmith.dequantize(f"{base}+{HERE / 'testbed' / name}", applied, overwrite=True, progress=False)
        judged(applied, f"| the adapter {name} | |", "")
    for row in rows():
        if row.method in args.methods:
            seconds = merge(row, base, work / "merged-adapter", applied)
            judged(applied, row.label, f"{seconds:.1f}")
    shutil.rmtree(applied)


def merge(row: Row, base: Path, merged: Path, applied: Path) -> float:
    """Make the merged model in `applied`; the merge took so many seconds of processor time."""
    parameters, shared = RECIPES[row.method]
    prefix = "" if row.rank else f"{base}+"
    models = [{"model": f"{prefix}{HERE / 'testbed' / name}", "parameters": parameters} for name in FINE_TUNES]
    recipe = {"merge_method": row.method, "models": models, "parameters": shared, "dtype": "float32"}
    before = resource.getrusage(resource.RUSAGE_SELF)
    if row.rank:
        options: dict[str, Any] = {"adapter_rank": row.rank, "adapter_space": row.space}
        weightsmith.merge(recipe, merged, overwrite=True, progress=False, **options)
    else:
        recipe |= {"base_model": str(base), "dtype": "bfloat16"}
        weightsmith.merge(recipe, applied, overwrite=True, progress=False)
    after = resource.getrusage(resource.RUSAGE_SELF)
    if row.rank:
        weightsmith.dequantize(f"{base}+{merged}", applied, overwrite=True, progress=False)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
