"""Small models, recipes with values to tune, and a text, for the tests of tuning."""

from __future__ import annotations

import random
from pathlib import Path

from tests.calibration_help import TEXT, changed, save_model

TIES = """# two fine-tunes
merge_method: ties
base_model: a
dtype: bfloat16
models:
  - model: b
    parameters: {weight: {tune: [0, 1]}, density: 0.5}   # the first
  - model: c
    parameters: {weight: [{tune: [0, 1]}, {tune: [0, 1]}], density: 0.5}
"""


def words(seed: int) -> str:
    """A text without a passage that occurs twice: the words of another in random order."""
    known = sorted({*TEXT.split()})
    return " ".join(random.Random(seed).choices(known, k=220))


def make(folder: Path) -> Path:
    """Three models, texts, and a recipe of them."""
    for seed, name in enumerate("abc"):
        save_model(folder / name, seed=seed)
        changed(folder / name, o_proj=8, down_proj=8, lm_head=8, embed_tokens=8)
    (folder / "r.yml").write_text(TIES)
    for seed, name in enumerate("tu"):
        (folder / f"{name}.txt").write_text(words(seed))
    return folder
