"""Mixtures of experts of the demo's fine-tunes: perplexities, and where their routers send the tokens of each text.

    make demo                                    # once: the environment and the models, in build/demo
    .venv/bin/python examples/moe/table.py       # makes and judges every recipe of examples/moe/recipes

Writes docs/moe-quality.md. Prompts and all choices come from testbed/tune, the numbers from testbed/eval (--tune shows the
former, --rows reads the beginning only; neither writes the page). Measurements are cached in WORK/moe.json.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
sys.path.insert(0, str(EXAMPLES))

from judge import DOMAINS, judge, routing  # noqa: E402
from measured import Measured, Row, Texts, ask, line, table  # noqa: E402
from smollm2 import BASE, FINE_TUNES, build_models  # noqa: E402

import weightsmith  # noqa: E402

PAGE = EXAMPLES.parent / "docs" / "moe-quality.md"
COMMAND = ".venv/bin/python examples/moe/table.py"
PROMPT = "La fonction renvoie"


def main() -> None:
    """Make, judge, write."""
    asked = ask(__doc__ or "", EXAMPLES / "testbed")
    work, texts = asked.work, asked.texts
    parents = build_models(work / "models", EXAMPLES / "testbed")
    os.chdir(work)  # the recipes' models begin here

    kept = Measured(work / "moe.json", again=asked.again)
    sources = {folder.name: folder for folder in parents} | {r.stem: r for r in sorted((HERE / "recipes").glob("*.yml"))}
    rows: dict[str, Row] = {}
    for name, source in sources.items():
        if not asked.recipes or name in asked.recipes:
            rows[name] = kept.row(source, texts, lambda name=name, source=source: _measure(name, source, texts, work))
            print(line(name, rows[name]["perplexity"]), end="", flush=True)
            print(shares({name: rows[name]}), flush=True)
    if asked.whole and not asked.recipes:
        PAGE.write_text(page(rows), encoding="utf-8")
        print(f"written: {PAGE}")


def _measure(name: str, source: Path, texts: Texts, work: Path) -> Row:
    out = work / "merged" / f"moe-{name}"
    if source.is_file():
        weightsmith.moe(source, out, overwrite=True)
    folder = out if source.is_file() else source
    try:
        perplexity = judge(folder, texts.folder, PROMPT, texts.rows, new_tokens=1).perplexity
        return {
            "perplexity": dict(perplexity),
            "routing": routing(folder, texts.folder, texts.rows) if source.is_file() else {},
        }
    finally:
        shutil.rmtree(out, ignore_errors=True)


def shares(rows: Mapping[str, Row], experts: int = 0) -> str:
    """For each mixture and text: the share of router weight that each expert gets, over all layers and tokens.

    experts  columns at least
    """
    lines = []
    for name, row in rows.items():
        for domain in DOMAINS if row["routing"] else ():
            cells = [f"{share:.0%}" for share in row["routing"][domain]]
            cells += [""] * (experts - len(cells))
            lines.append(f"| {name} | {domain} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(rows: Mapping[str, Row]) -> str:
    """docs/moe-quality.md."""
    perplexity = table({name: row["perplexity"] for name, row in rows.items()}, (BASE, *FINE_TUNES))
    experts = max(len(share) for row in rows.values() for share in row["routing"].values())
    head = f"| | text | {' | '.join(f'expert {e}' for e in range(experts))} |\n| --- | --- |{' ---: |' * experts}\n"
    text = (HERE / "page.md").read_text(encoding="utf-8")
    return text.replace("PERPLEXITIES\n", perplexity).replace("SHARES\n", head + shares(rows, experts) + "\n")


if __name__ == "__main__":
    main()
