"""Is what a fine-tune writes of its domain? Counts the rows by the kind of text that their trigrams are most like.

    make demo                                         # once: the environment and the models
    .venv/bin/python examples/quality/own_texts.py    # minutes

Each of the demo's models writes ROWS rows of 128 tokens, as `weightsmith auto` does without texts. A row is of the kind whose
text in examples/testbed/tune makes its trigrams of characters most likely (each trigram counted once more than it occurs).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent
KINDS = ("fr", "de", "py", "en")
MODELS = ("base", "fr", "de", "py")
ROWS = 20


def trigrams(text: str) -> Counter[str]:
    """How often each three characters in a row occur."""
    return Counter(text[start : start + 3] for start in range(len(text) - 2))


def kind_of(row: str, counts: dict[str, Counter[str]]) -> str:
    """The kind whose trigrams make those of a row most likely."""
    distinct = len(set().union(*counts.values()))

    def likelihood(kind: str) -> float:
        total = counts[kind].total() + distinct
        return sum(n * math.log((counts[kind][trigram] + 1) / total) for trigram, n in trigrams(row).items())

    return max(counts, key=likelihood)


def main() -> None:
    """Let the models write, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("build/demo/models"), help="folder of the demo's models")
    models = parser.parse_args().models
    counts = {kind: trigrams((EXAMPLES / "testbed" / "tune" / f"{kind}.txt").read_text(encoding="utf-8")) for kind in KINDS}
    print("| rows written by | " + " | ".join(KINDS) + " |")
    print("| --- |" + " ---: |" * len(KINDS))
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "own.jsonl")
            command = [sys.executable, "-m", "weightsmith", "write", str(models / model), str(out)]
            subprocess.run([*command, "--rows", str(ROWS), "--quiet"], check=True)
            rows = [json.loads(line)["text"] for line in out.read_text(encoding="utf-8").splitlines()]
        kinds = Counter(kind_of(row, counts) for row in rows)
        print(f"| `{model}` | " + " | ".join(str(kinds[kind]) for kind in KINDS) + " |", flush=True)


if __name__ == "__main__":
    main()
