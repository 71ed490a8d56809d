"""Models that are looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.fuzz.kind import Kind, Rng
from scripts.fuzz.mutators import mutate_model
from scripts.fuzz.tokenizers import make_tokenizers


def _make_looked_at() -> None:
    make_tokenizers()
    card = "license: apache-2.0\nbase_model:\n- org/base\n- org/other\ntags: [merge, 'x y']\nlanguage: [fr, de]"
    Path("a/README.md").write_text(f"---\n{card}\n---\n\n# A model\n")


def _use_looks(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    def look(result: Any) -> None:
        json.dumps(result.to_json(), allow_nan=False)
        result.report().to_html().encode()

    ties = {"merge_method": "ties", "base_model": "b", "models": [{"model": "a"}, {"model": "a+lora"}]}
    ties["parameters"] = {"weight": 1, "density": 0.5}
    alone: dict[str, Any] = {"threads": 1, "progress": False}
    yield lambda: look(weightsmith.inspect("a", stats=True, **alone))
    yield lambda: look(weightsmith.diff("b", "a", **alone))
    yield lambda: look(weightsmith.diff("a", rng.choice(("b", "a+lora", "q", "x")), **alone))
    yield lambda: look(weightsmith.diff("b", "a+lora", base="a", **alone))
    yield lambda: look(weightsmith.preview(ties, **alone))
    yield lambda: look(weightsmith.preview(ties, full=True, **alone))


KINDS = {
    "look": Kind(
        _make_looked_at,
        ("a/config.json", "a/model.safetensors", "a/tokenizer.json", "a/tokenizer_config.json", "a/README.md"),
        mutate_model,
        _use_looks,
    ),
}
