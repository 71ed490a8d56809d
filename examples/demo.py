"""The demo: real fine-tunes of a real language model, merged, loaded with transformers, and measured.

    make demo                                       # from a bare Python 3.11 with pip
    make demo DEMO_OPTIONS=--whole                  # the whole texts, as in testbed/README.md: twice as long

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
import warnings
from pathlib import Path

from judge import DOMAINS, Verdict, judge
from rich.console import Console
from rich.table import Table
from smollm2 import BASE, FINE_TUNES, build_models

from weightsmith._execution.progress import Reading, meter
from weightsmith._reports.judge import ROW_TOKENS

HERE = Path(__file__).resolve().parent
PROMPT = "La fonction renvoie"

# How much of each held-out text is read: the whole of it (--whole) takes twice as long, its first row (--quick) a quarter.
FIRST_ROWS = 4

# Geometric means of the perplexities as recorded, on the first row of each text, on FIRST_ROWS rows and on the whole. For
# merges the last two are those of mergekit 0.1.5 on the same recipes: weightsmith must do as well. The first are of merges by
# weightsmith that had these.
RECORDED = {
    "base": (14.44, 13.20, 13.26),
    "fr": (11.15, 10.63, 10.24),
    "de": (11.09, 9.68, 9.18),
    "py": (12.58, 11.01, 10.98),
    "linear": (10.63, 9.35, 8.91),
    "task_arithmetic": (10.50, 9.21, 8.63),
    "stages": (10.89, 9.52, 9.17),
    "ties": (10.31, 9.06, 8.47),
    "passthrough_40": (13.87, 12.83, 12.36),
}

# A wrong merge is off by far more; another CPU, or another order of equal magnitudes in TIES, by far less.
TOLERANCE = 0.01

console = Console(width=None if sys.stdout.isatty() else 120)


def main() -> None:
    """Build, merge, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder for models and results")
    parser.add_argument("--merges-only", action="store_true", help="do not judge the models that are merged")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help=f"judge on one row of each text, not {FIRST_ROWS}")
    amount.add_argument("--whole", action="store_true", help=f"judge on the whole texts, not {FIRST_ROWS} rows of each")
    args = parser.parse_args()
    work: Path = args.work.resolve()
    column, rows = (0, 1) if args.quick else (2, None) if args.whole else (1, FIRST_ROWS)
    recipes = sorted((HERE / "recipes").glob("*.yml"), key=_order)
    parents = () if args.merges_only else (BASE, *FINE_TUNES)
    total = len(parents) + len(recipes)

    _title(f"Models: SmolLM2-135M-Instruct and three fine-tunes of it, in {work / 'models'}")
    _set_up_libraries()
    with _timed("models ready"), meter(quiet=False) as shown:
        build_models(work / "models", HERE / "testbed", lambda done, all_: shown.show(Reading("building", done, all_, None)))

    verdicts: dict[str, Verdict] = {}
    for name in parents:
        _title(f"{len(verdicts) + 1} of {total}: {name}")
        verdicts[name] = _judge(work / "models" / name, rows)
    for recipe in recipes:
        _title(f"{len(verdicts) + 1} of {total}: {recipe.stem}, by weightsmith merge {recipe.name}")
        merged = work / "merged" / recipe.stem
        with _timed("merged and written"):
            _merge(recipe, merged, work)
        verdicts[recipe.stem] = _judge(merged, rows)

    amount = "the whole of" if rows is None else f"the first {rows * ROW_TOKENS:,} tokens of"
    _title(f"Perplexity on {amount} each held-out text, lower is better")
    recorded = {name: means[column] for name, means in RECORDED.items()}
    lines = _rows(verdicts, recorded)
    console.print(_table(lines))
    (work / "table.md").write_text(_markdown(lines), encoding="utf-8")
    console.print(f"The same as Markdown: {work / 'table.md'}")
    _compare(verdicts, recorded)


def _order(recipe: Path) -> tuple[bool, str]:
    """Merges first, the stack last."""
    return recipe.stem.startswith("passthrough"), recipe.stem


def _merge(recipe: Path, out: Path, work: Path) -> None:
    """Run the command a user would run, in the folder that the recipe's paths are relative to."""
    command = Path(sys.executable).with_name("weightsmith")
    if not command.exists():
        raise SystemExit(f"{command} is missing: run `pip install -e .` with {sys.executable}, or `make demo`")
    out.parent.mkdir(exist_ok=True)
    result = subprocess.run([command, "merge", recipe, out, "--overwrite"], cwd=work, check=False)
    if result.returncode:
        raise SystemExit(f"weightsmith merge {recipe} ended with status {result.returncode}")


def _judge(folder: Path, rows: int | None) -> Verdict:
    with _timed(f"{folder.name} judged"), meter(quiet=False) as shown:
        verdict = judge(
            *(folder, HERE / "testbed" / "eval", PROMPT, rows),
            told=lambda done, all_: shown.show(Reading(f"judging {folder.name}", done, all_, None)),
        )
    console.print(f"  {PROMPT} ... {' '.join(verdict.continuation.split())}", markup=False, highlight=False)
    return verdict


HEADINGS = ("model", "layers", *DOMAINS, "geometric mean", "recorded")


def _rows(verdicts: dict[str, Verdict], recorded: dict[str, float]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            str(verdict.layers),
            *(f"{verdict.perplexity[domain]:.2f}" for domain in DOMAINS),
            f"{verdict.mean:.2f}",
            f"{recorded[name]:.2f}",
        )
        for name, verdict in verdicts.items()
    ]


def _table(lines: list[tuple[str, ...]]) -> Table:
    by = "by mergekit 0.1.5 (with --quick: by weightsmith)"
    table = Table(caption=f"recorded: measured before, the merges and the stack as made {by}")
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if i else "left")
    for line in lines:
        table.add_row(*line)
    return table


def _markdown(lines: list[tuple[str, ...]]) -> str:
    head = [HEADINGS, ("---",) + ("---:",) * (len(HEADINGS) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [*head, *lines])


def _compare(verdicts: dict[str, Verdict], recorded: dict[str, float]) -> None:
    wrong = [
        f"{name}: {verdict.mean:.2f}, recorded {recorded[name]:.2f}"
        for name, verdict in verdicts.items()
        if abs(verdict.mean / recorded[name] - 1) > TOLERANCE
    ]
    if wrong:
        raise SystemExit(f"not within {TOLERANCE:.0%} of what is recorded: {'; '.join(wrong)}")


def _set_up_libraries() -> None:
    """No network, no spinning, no progress bars of single files, no word on what transformers 6 will rename."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # torch's threads wait for each other by spinning: beside other work that takes up to twice as long as sleeping.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TQDM_DISABLE", "1")
    # torch makes this folder when it is imported, in /tmp if it is not told where.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(HERE.parent / "build/torchinductor"))
    # All of these are read when the libraries are imported, so first.
    warnings.simplefilter("ignore", FutureWarning)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


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
