"""Small models, recipes with values to tune, and a text, for the tests of tuning."""

from __future__ import annotations

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


def make(folder: Path) -> Path:
    """Three models, texts, and a recipe of them."""
    for seed, name in enumerate("abc"):
        save_model(folder / name, seed=seed)
        changed(folder / name, o_proj=8, down_proj=8, lm_head=8, embed_tokens=8)
    (folder / "r.yml").write_text(TIES)
    (folder / "t.txt").write_text(TEXT)
    (folder / "u.txt").write_text(TEXT[::-1])
    return folder
