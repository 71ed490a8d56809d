"""The quality table: one row a recipe, on the models and texts of the demo (examples/testbed).

    make demo                                        # once: the environment and the models, in build/demo
    .venv/bin/python examples/quality/table.py       # merges and judges every recipe of examples/quality/recipes

Writes docs/quality.md. Parameters were tuned on testbed/tune and are reported on testbed/eval (--tune shows the former, --rows
reads the beginning only; neither writes the page). What is measured is kept in WORK/quality.json by recipe and text, so that
an interrupted run goes on; --again forgets it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
sys.path.insert(0, str(EXAMPLES))

from judge import judge  # noqa: E402
from measured import Measured, Row, Texts, ask, line, table  # noqa: E402
from smollm2 import BASE, FINE_TUNES, build_models  # noqa: E402

import weightsmith  # noqa: E402

PAGE = EXAMPLES.parent / "docs" / "quality.md"
COMMAND = ".venv/bin/python examples/quality/table.py"

HEAD = f"""<!-- Made by examples/quality/table.py. Do not edit: run `{COMMAND}`. -->

# What the methods do to a small language model

Perplexity on held-out text, lower is better. The models are SmolLM2-135M-Instruct and three fine-tunes of it (LoRA of rank 8,
added to the weights, bf16): on French and German manual pages and on the Python standard library. `en` is English manual pages,
which no model was trained on. Each row is one recipe of [examples/quality/recipes](../examples/quality/recipes), merged with
`weightsmith merge`. The table is measured on the whole of `examples/testbed/eval`, in float32. `tsv_m_flat` and `tsv_m_tuned`
were tuned by hand on `examples/testbed/tune` alone, the first four rows of 384 tokens of each text, in some twenty tries and
with a look at the gradient of the loss there; the other rows have the settings of the demo, of earlier
measurements or, where the recipe says so, none that were tuned: they tell little about what the method can do.

"""

FOOT = f"""
`tsv_m_tuned` has been fitted to these four kinds of text; its lead over `tsv_m_flat` is what tuning gives, not a better method.

One small model and three fine-tunes of one kind: this tells that the methods are made right and how they compare *here*, not
which is best for yours. Low-rank deltas in separate domains suit the methods that keep a few directions of each. On full
fine-tunes of language models task arithmetic was found the most reliable, and the spectral methods at default strength
lost to the base (https://arxiv.org/abs/2511.21437).

Made by:

```bash
make demo
{COMMAND}
```
"""


def main() -> None:
    """Merge, judge, write."""
    asked = ask(__doc__ or "", EXAMPLES / "testbed")
    work, texts = asked.work, asked.texts
    parents = build_models(work / "models", EXAMPLES / "testbed")
    os.chdir(work)  # the recipes' paths begin here

    kept = Measured(work / "quality.json", again=asked.again)
    sources = {folder.name: folder for folder in parents} | {r.stem: r for r in sorted((HERE / "recipes").glob("*.yml"))}
    unknown = sorted(set(asked.recipes) - set(sources))
    if unknown:
        raise SystemExit(f"no row is called {', '.join(unknown)}; rows: {', '.join(sources)}")
    rows: dict[str, Row] = {}
    for name, source in sources.items():
        if not asked.recipes or name in asked.recipes:
            rows[name] = kept.row(source, texts, lambda name=name, source=source: _measure(name, source, texts, work))
        elif (known := kept.known(source, texts)) is not None:
            rows[name] = known
        if name in rows:
            print(line(name, rows[name]), end="", flush=True)
    if asked.whole and len(rows) == len(sources):
        PAGE.write_text(HEAD + table(rows, (BASE, *FINE_TUNES)) + FOOT, encoding="utf-8")
        print(f"written: {PAGE}")


def _measure(name: str, source: Path, texts: Texts, work: Path) -> Row:
    if source.is_dir():
        return _judge(source, texts)
    out = work / "merged" / f"quality-{name}"
    weightsmith.merge(source, out, overwrite=True)
    try:
        return _judge(out, texts)
    finally:
        shutil.rmtree(out)


def _judge(folder: Path, texts: Texts) -> Row:
    return dict(judge(folder, texts.folder, "La fonction renvoie", texts.rows, new_tokens=1).perplexity)


if __name__ == "__main__":
    main()
