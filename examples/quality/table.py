"""The quality tables: one row a recipe, on the models and texts of the demo (examples/testbed), or on a second testbed.

    make demo                                        # once: the environment and the models, in build/demo
    .venv/bin/python examples/quality/table.py       # merges and judges every recipe of examples/quality/recipes
    .venv/bin/python examples/quality/table.py --model gemma      # on the models and texts of testbed.py, in build/demo/gemma

Writes docs/quality.md from page.md and the measurements, and the table of docs/auto.md. Measurements are kept in
measured/MODEL.json by recipe and text: only new and changed recipes are measured. --again measures all. Parameters were tuned
on the `tune` texts and are reported on the `eval` texts (--tune shows the former, --rows reads the beginning only; neither
changes the pages).
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
sys.path.insert(0, str(EXAMPLES))
sys.path.insert(0, str(HERE))

import auto_cases  # noqa: E402
from judge import DOMAINS  # noqa: E402
from measured import Measured, Row, Texts, ask, line, mean, table  # noqa: E402
from smollm2 import BASE, FINE_TUNES, build_models  # noqa: E402
from testbed import STEPS, build_testbed  # noqa: E402

import weightsmith  # noqa: E402
from weightsmith._reports.judge import Judge  # noqa: E402

PAGE = EXAMPLES.parent / "docs" / "quality.md"
AUTO_PAGE = PAGE.with_name("auto.md")
AUTO_BLOCK = re.compile(r"(<!-- gains:begin -->\n).*?(<!-- gains:end -->)", re.DOTALL)
PARENTS = (BASE, *FINE_TUNES)
REFERENCE = "linear"
"""The recipe that others are compared with, row by row."""
TEXTS_OF_RECIPES = "../../examples/testbed"
"""The folder of texts, as recipes name it."""


@dataclass(frozen=True)
class Testbed:
    """Models and texts.

    build  (folder to work in) → the models' folders
    texts  (folder to work in) → the folder with `tune` and `eval`
    work   folder to work in, below that of the command line
    rows   rows of each text of `eval` that are read; None: all
    """

    build: Callable[[Path], tuple[Path, ...]]
    texts: Callable[[Path], Path]
    work: str = "."
    rows: int | None = None


TESTBEDS = {
    "smollm2": Testbed(lambda work: build_models(work / "models", EXAMPLES / "testbed"), lambda work: EXAMPLES / "testbed"),
    "gemma": Testbed(build_testbed, lambda work: work / "texts", "gemma", rows=2),
}


def main() -> None:
    """Merge, judge, write."""
    asked = ask(__doc__ or "", EXAMPLES / "testbed", models=tuple(TESTBEDS))
    testbed = TESTBEDS[asked.model]
    work = asked.work / testbed.work
    texts = Texts(testbed.texts(work) / asked.texts.folder.name, testbed.rows if asked.whole else asked.texts.rows)
    kept = Measured(_kept(asked.model) if asked.whole else work / "quality.json", again=asked.again)
    if unknown := sorted(set(asked.recipes) - set(sources())):
        raise SystemExit(f"no row is called {', '.join(unknown)}; rows: {', '.join(sources())}")
    for name, source in sources().items():
        if not asked.recipes or name in asked.recipes:
            row = kept.row(source, texts, partial(_measure, name, source, texts, testbed, work))
            print(line(name, perplexities(row)), end="", flush=True)
    if asked.whole:
        for path, text in {PAGE: page(), AUTO_PAGE: auto_page()}.items():
            path.write_text(text, encoding="utf-8")
            print(f"written: {path}")


def sources() -> dict[str, Path]:
    """Row → a recipe, or a model by its name."""
    return {name: Path(name) for name in PARENTS} | {r.stem: r for r in sorted((HERE / "recipes").glob("*.yml"))}


def _kept(model: str) -> Path:
    return HERE / "measured" / f"{model}.json"


def _measure(name: str, source: Path, texts: Texts, testbed: Testbed, work: Path) -> Row:
    testbed.build(work)
    if name in PARENTS:
        return _judge(work / "models" / name, texts)
    os.chdir(work)  # the recipes' models begin here
    recipe = yaml.safe_load(source.read_text(encoding="utf-8").replace(TEXTS_OF_RECIPES, str(texts.folder.parent)))
    out = work / "merged" / f"quality-{name}"
    weightsmith.merge(recipe, out, overwrite=True, progress=False)
    try:
        return _judge(out, texts)
    finally:
        shutil.rmtree(out)


def _judge(folder: Path, texts: Texts) -> Row:
    """Domain → the mean cross-entropy of each of its rows, in nats."""
    judge = Judge.of_folder(folder)
    return {d: judge.losses((texts.folder / f"{d}.txt").read_text(encoding="utf-8"), texts.rows) for d in DOMAINS}


# --- the page ------------------------------------------------------------------------------------------------------------


def page() -> str:
    """docs/quality.md: page.md with the tables of what is kept."""
    first, second = (known(model) for model in TESTBEDS)
    both = [name for name in first if name in second and name not in PARENTS]
    means = [[mean(perplexities(rows[name])) for name in both] for rows in (first, second)]
    tables = {
        "{FIRST}": lambda: table({name: perplexities(row) for name, row in first.items()}, PARENTS),
        "{SECOND}": lambda: compared(second),
        "{CARRIED}": lambda: carried(first, second, both),
        "{SPEARMAN}": lambda: f"{spearman(*means):.2f}",
        "{RECIPES}": lambda: str(len(both)),
        "{SOURCES}": lambda: str(len(sources()) - len(PARENTS)),
        "{ROWS}": lambda: str(TESTBEDS["gemma"].rows),
        "{STEPS}": lambda: str(STEPS),
        "{AUTO_SUMMARY}": auto_summary,
        "{AUTO}": auto_table,
        "{AUTO_COST}": auto_cost,
        "{AUTO_RIVALS}": lambda: auto_rivals(first, second),
    }
    text = (HERE / "page.md").read_text(encoding="utf-8")
    for name, make in tables.items():
        text = text.replace(name, make().rstrip("\n")) if name in text else text
    return text


def auto_page() -> str:
    """docs/auto.md with the table of what `auto` gained."""
    short = "".join(f"| {about} | {' | '.join(map(_gain, merges))} |\n" for about, merges in auto_changes())
    block = f"| fine-tunes | with texts | without texts |\n| --- | ---: | ---: |\n{short}"
    return AUTO_BLOCK.sub(lambda match: match[1] + block + match[2], AUTO_PAGE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class AutoChange:
    """What `auto` chose in one case, and by how many percent it differs from the mean, with standard errors.

    all_texts  of all texts that are judged
    others     of those of no fine-tune
    """

    chosen: str
    all_texts: tuple[float, float]
    others: tuple[float, float]

    @property
    def is_better(self) -> bool:
        """By more than two standard errors."""
        change, error = self.all_texts
        return change < -2 * error


def auto_changes() -> Iterator[tuple[str, tuple[AutoChange, AutoChange]]]:
    """Each case that is measured: what was merged, and what `auto` did with texts and without."""
    measured = auto_cases.known()
    for name, case in auto_cases.CASES.items():
        merges = measured.get(name, {})
        if not {"mean", "with", "without"} <= merges.keys():
            continue
        yield case.about, (_change(case, merges, "with"), _change(case, merges, "without"))


def _change(case: auto_cases.Case, merges: Mapping[str, Any], merge: str) -> AutoChange:
    others = [kind for kind in case.judged if kind not in case.kinds.values()]
    changes = (difference(merges[merge]["rows"], merges["mean"]["rows"], kinds) for kinds in (case.judged, others))
    return AutoChange(merges[merge]["choice"]["name"], *changes)


def auto_table() -> str:
    """The cases of `auto` as a Markdown table: each merge against the mean, on all texts, and on kinds of no fine-tune."""
    lines = [
        "| fine-tunes | with texts, % | other domains, % | chosen | without, % | other domains, % | chosen |",
        "| --- | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    for about, merges in auto_changes():
        cells = [about]
        for merge in merges:
            for change, error in (merge.all_texts, merge.others):
                cells.append("0" if merge.chosen == "mean" else f"{change:+.1f} ± {error:.1f}")
            cells.append(merge.chosen)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _gain(merge: AutoChange) -> str:
    change, error = merge.all_texts
    return "the mean was written" if merge.chosen == "mean" else f"{change:+.1f} ± {error:.1f}%"


def auto_summary() -> str:
    """How often `auto` beat the mean, in a sentence."""
    with_texts, without = zip(*(merges for _, merges in auto_changes()), strict=True)
    better, better_without = (sum(merge.is_better for merge in merges) for merges in (with_texts, without))
    means = sum(merge.chosen == "mean" for merge in without)
    cases = f"all {better}" if better == len(with_texts) else f"{better} of the {len(with_texts)}"
    return (
        f"* With texts, [`weightsmith auto`](auto.md) beat the plain mean in {cases} cases below. "
        f"Without texts, it beat the mean in {better_without} and wrote the mean itself in {means}."
    )


def auto_cost() -> str:
    """What the runs of `auto` took, in a sentence for each way. Runs of earlier code have no numbers."""
    measured = auto_cases.known()
    lines = []
    for merge, title in (("with", "With texts"), ("without", "Without texts")):
        for base, cases in (("SmolLM2", [n for n in measured if n != "gemma"]), ("Gemma", ["gemma"])):
            runs = [run for n in cases if (run := measured.get(n, {}).get(merge)) and "peak_bytes" in run]
            if runs:
                seconds, peaks = ([run[key] for run in runs] for key in ("processor_seconds", "peak_bytes"))
                lines.append(f"{title}, {base} took {_span(seconds, 1)} CPU seconds and {_span(peaks, 1e9, 1)} GB of memory.")
    return "* " + " ".join(lines)


def auto_rivals(first: Mapping[str, Row], second: Mapping[str, Row]) -> str:
    """What else could have been done: the best recipe of each testbed with hindsight, and `tune`."""
    best = []
    for testbed, rows in (("SmolLM2", first), ("Gemma", second)):
        scores = {name: mean(perplexities(row)) for name, row in rows.items() if name not in PARENTS}
        name = min(scores, key=lambda name: scores[name])
        best.append(f"`{name}` on {testbed} ({100 * (scores[name] / scores[REFERENCE] - 1):+.1f}%)")
    lines = [f"* In hindsight, the best recipes in the tables below are {' and '.join(best)}."]
    demo = auto_cases.known().get("demo", {})
    if tuned := demo.get(auto_cases.TUNED):
        change, error = difference(tuned["rows"], demo["mean"]["rows"], auto_cases.CASES["demo"].judged)
        lines.append(
            f"* [`weightsmith tune`](tune.md), given the same texts to tune the weights of `ties`, reached {change:+.1f} ± "
            f"{error:.1f}% on the demo's models, after {tuned['trials']} trials in "
            f"{tuned['processor_seconds']:,.0f} CPU seconds."
        )
    return "\n".join(lines)


def _span(values: Sequence[float], unit: float, digits: int = 0) -> str:
    least, most = (f"{value / unit:,.{digits}f}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def known(model: str) -> dict[str, Row]:
    """The rows of a testbed that are kept, on the texts of `eval`."""
    kept = Measured(_kept(model), again=False)
    rows = {name: kept.known(source, Texts(Path("eval"), TESTBEDS[model].rows)) for name, source in sources().items()}
    return {name: row for name, row in rows.items() if row is not None}


def perplexities(row: Row) -> dict[str, float]:
    """Domain → perplexity, of a row of losses. The first rows were kept as rounded perplexities, with their `mean`."""
    return {name: math.exp(sum(kept) / len(kept)) if isinstance(kept, list) else kept for name, kept in row.items()}


def difference(row: Row, reference: Row, kinds: Sequence[str] = DOMAINS) -> tuple[float, float]:
    """By how many percent the geometric mean of the perplexities differs, and the standard error of this: row by row."""
    pairs = [np.subtract(row[d], reference[d]) for d in kinds]
    error = math.sqrt(sum(float(p.var(ddof=1)) / len(p) for p in pairs)) / len(pairs)
    return 100 * math.expm1(sum(float(p.mean()) for p in pairs) / len(pairs)), 100 * error


def compared(rows: Mapping[str, Row]) -> str:
    """The rows as a Markdown table, the best last, each with its difference from the reference."""
    lines = table({name: perplexities(row) for name, row in rows.items()}, PARENTS).splitlines()
    lines[0] += f" against `{REFERENCE}`, % |"
    lines[1] += " ---: |"
    for i, text in enumerate(lines[2:], 2):
        name = text.split(" | ")[0].removeprefix("| ")
        change, error = difference(rows[name], rows[REFERENCE])
        lines[i] += f" {change:+.1f} ± {error:.1f} |" if name != REFERENCE else " 0 |"
    return "\n".join(lines)


def carried(first: Mapping[str, Row], second: Mapping[str, Row], names: Iterable[str]) -> str:
    """Places and differences from the reference in both testbeds as a Markdown table, the best of the second last."""
    rows: list[tuple[Any, ...]] = []
    places = [_places(rows, names := list(names)) for rows in (first, second)]
    for name in sorted(names, key=lambda name: -places[1][name]):
        a, b = (100 * (mean(perplexities(rows[name])) / mean(perplexities(rows[REFERENCE])) - 1) for rows in (first, second))
        rows.append((name, f"{a:+.1f}", f"{b:+.1f}", places[0][name], places[1][name]))
    head = "| | SmolLM2, % | Gemma, % | rank, SmolLM2 | rank, Gemma |\n| --- | ---: | ---: | ---: | ---: |\n"
    return head + "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _places(rows: Mapping[str, Row], names: Iterable[str]) -> dict[str, int]:
    """Row → its place; 1 is the best."""
    ordered = sorted(names, key=lambda name: mean(perplexities(rows[name])))
    return {name: place for place, name in enumerate(ordered, 1)}


def spearman(a: Iterable[float], b: Iterable[float]) -> float:
    """Spearman's rank correlation of two lists. Equal values share the mean of their ranks."""
    ranks = []
    for values in (np.array(list(a)), np.array(list(b))):
        ranks.append((values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) - 1) / 2)
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()
