"""Rows of a table of perplexities, each measured once: a model, or what a recipe makes. For the three table.py.

Measurements are cached in a JSON file, by the recipe's text and the texts it was judged on: an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from judge import DOMAINS

Row = dict[str, Any]
"""Domain → perplexity, and whatever else was measured."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What models are judged on. rows: of 384 tokens read of each; None: all."""

    folder: Path
    rows: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line of a table. whole: on all of the texts of `eval`, so that the page may be written."""

    recipes: tuple[str, ...]
    model: str
    work: Path
    texts: Texts
    again: bool

    @property
    def whole(self) -> bool:
        return self.texts.folder.name == "eval" and self.texts.rows is None


def ask(about: str, testbed: Path, models: tuple[str, ...] = ("smollm2",)) -> Asked:
    """Read the command line.

    about    what the program says of itself
    testbed  the folder with the texts
    models   among which to choose; the first is the default
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="names of rows (default: all)")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder with the demo's models")
    if len(models) > 1:
        parser.add_argument("--model", choices=models)
    parser.set_defaults(model=models[0])
    parser.add_argument("--tune", action="store_true", help="measure on testbed/tune; writes no page")
    parser.add_argument("--rows", type=int, help="rows of 384 tokens read of each text; writes no page")
    parser.add_argument("--again", action="store_true", help="ignore the cache and measure everything")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TQDM_DISABLE", "1")
    texts = Texts(testbed / ("tune" if args.tune else "eval"), args.rows)
    return Asked(tuple(args.recipes), args.model, args.work.resolve(), texts, args.again)


class Measured:
    """The rows that are known; `row` measures and keeps one that is not."""

    def __init__(self, file: Path, *, again: bool) -> None:
        self.file = file
        self.rows: dict[str, Row] = {} if again or not file.exists() else json.loads(file.read_text())

    def known(self, source: Path, texts: Texts) -> Row | None:
        """The row of a model's folder or a recipe, if it is known."""
        return self.rows.get(_key(source, texts))

    def row(self, source: Path, texts: Texts, measure: Callable[[], Row]) -> Row:
        """The row of a model's folder or a recipe."""
        key = _key(source, texts)
        if key not in self.rows:
            self.rows[key] = measure()
            self.file.write_text(json.dumps(self.rows, indent=1))
        return self.rows[key]


def _key(source: Path, texts: Texts) -> str:
    """The name, and what a measurement depends on: the model's name or the recipe's text, and the texts."""
    what = source.read_text() if source.is_file() else source.name
    digest = hashlib.sha256(f"{what}\n{texts.folder.name}\n{texts.rows}".encode()).hexdigest()
    return f"{source.stem} {digest[:16]}"


def mean(row: Mapping[str, float]) -> float:
    """The geometric mean of the domains' perplexities. A row that was kept rounded has it as `mean`."""
    if "mean" in row:
        return row["mean"]
    return math.exp(sum(math.log(row[d]) for d in DOMAINS) / len(DOMAINS))


def line(name: str, row: Mapping[str, float]) -> str:
    """A row of the table, in Markdown."""
    return f"| {name} | {' | '.join(f'{row[d]:.2f}' for d in DOMAINS)} | {mean(row):.2f} |\n"


def table(rows: Mapping[str, Mapping[str, float]], first: tuple[str, ...]) -> str:
    """The rows as a Markdown table: `first` as they come, then the others, the best last."""
    known = [name for name in rows if name in first]
    others = sorted((name for name in rows if name not in known), key=lambda name: -mean(rows[name]))
    head = f"| | {' | '.join(DOMAINS)} | geometric mean |\n| --- |{' ---: |' * (len(DOMAINS) + 1)}\n"
    return head + "".join(line(name, rows[name]) for name in known + others)
