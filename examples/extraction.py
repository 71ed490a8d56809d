"""Adapters extracted from the demo's fine-tunes: how much they keep, and how well the base predicts with them.

    python examples/extraction.py                # needs the models of `make demo`, or makes them

For each fine-tune and each way to choose ranks: extract an adapter from the bf16 model, apply it to the base, and measure the
perplexity on the held-out text of the fine-tune's kind. The table goes to WORK/extraction.md too.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from judge import judge
from smollm2 import FINE_TUNES, build_models

import weightsmith

HERE = Path(__file__).resolve().parent
WAYS: dict[str, dict[str, Any]] = {
    **{f"rank {rank}": {"max_rank": rank} for rank in (2, 4, 8, 16, 32, 64)},
    "energy 0.9": {"energy": 0.9},
    "energy 0.99": {"energy": 0.99},
    "1 M parameters": {"max_parameters": 1_000_000},
    "rank 8, for vllm": {"max_rank": 8, "layout": "vllm"},
}


def main() -> None:
    """Extract, apply, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder for models and results")
    parser.add_argument("--rows", type=int, default=None, help="rows of 384 tokens of each text; all if not given")
    parser.add_argument("--fine-tunes", nargs="+", default=FINE_TUNES, choices=FINE_TUNES, help="which ones")
    args = parser.parse_args()
    work: Path = args.work.resolve()
    models = work / "models"
    build_models(models, HERE / "testbed")
    lines = [
        "| fine-tune | adapter | parameters | kept | signal kept | perplexity |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name in args.fine_tunes:
        for label, folder in (("the base", models / "base"), ("the fine-tune", models / name)):
            lines.append(f"| {name} | {label} | | | | {perplexity(folder, name, args.rows):.3f} |")
            print(lines[-1], flush=True)
        for label, options in WAYS.items():
            adapter, applied = work / "extracted", work / "applied"
            extraction = weightsmith.extract_lora(
                models / name, models / "base", adapter, overwrite=True, progress=False, **options
            )
            report = extraction.reports["extraction"].to_json()  # type: ignore[attr-defined]
            weightsmith.dequantize(f"{models / 'base'}+{adapter}", applied, overwrite=True, progress=False)
            shares = f"{report['kept']:.2%} | {report['signal_kept']:.2%}"
            score = perplexity(applied, name, args.rows)
            lines.append(f"| {name} | {label} | {report['parameters']:,} | {shares} | {score:.3f} |")
            print(lines[-1], flush=True)
            shutil.rmtree(applied)
    (work / "extraction.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def perplexity(folder: Path, domain: str, rows: int | None) -> float:
    """On the held-out text of one kind."""
    return judge(folder, HERE / "testbed" / "eval", "The", rows, new_tokens=1, domains=(domain,)).perplexity[domain]


if __name__ == "__main__":
    main()
