"""Mixtures of experts: settings that llama.cpp has in its code, and keys that it would read otherwise than transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import weightsmith
from tests import zoo
from tests.gguf_help import BYTE_LEVEL, tokenizer_files, write_gguf
from weightsmith._base.errors import PlanError, Unsupported


def saved(name: str, folder: Path, **changes: Any) -> Path:
    source = zoo.save(name, folder, 1, vocab_size=262)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
    return source


def written(name: str, folder: Path, **changes: Any) -> Path:
    weightsmith.quantize(saved(name, folder / "m", **changes), folder / "q", "gguf-f32", progress=False)
    return folder / "q" / "model.gguf"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("afmoe", {"mup_enabled": False}, "mup_enabled is False, and llama.cpp takes True for granted"),
        ("afmoe", {"mup_enabled": "absent"}, "mup_enabled is False, and llama.cpp takes True for granted"),
        ("afmoe", {"route_norm": False}, "route_norm is False, and llama.cpp takes True for granted"),
        ("afmoe", {"score_func": "softmax"}, "score_func is 'softmax', and llama.cpp takes 'sigmoid' for granted"),
        ("afmoe", {"layer_types": ["full_attention"] * 5}, r"layer_types is \['full_attention'"),
        (
            "afmoe",
            {"layer_types": "absent", "global_attn_every_n_layers": 3},
            "global_attn_every_n_layers is 3, and llama.cpp takes 4 for granted",
        ),
        ("afmoe", {"sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        written(name, tmp_path, **changes)


def test_scores_of_trinity_are_always_normalised(tmp_path: Path) -> None:
    """config.json of transformers does not say so, and llama.cpp does not normalise them where the file does not say it."""
    path = written("afmoe", tmp_path)
    reader = gguf.GGUFReader(path)
    keys = {name.removeprefix("afmoe."): field.contents() for name, field in reader.fields.items()}
    assert keys["expert_weights_norm"] is True
    kept = {name: value for name, value in keys.items() if not name.startswith("GGUF.") and name != "general.architecture"}
    tensors = {tensor.name: (np.array(tensor.data), "F32") for tensor in reader.tensors}
    weightsmith.open_checkpoint(write_gguf(tmp_path / "same.gguf", "afmoe", tensors, kept)).close()
    for changed in ({**kept, "expert_weights_norm": False}, {n: v for n, v in kept.items() if n != "expert_weights_norm"}):
        other = write_gguf(tmp_path / "other.gguf", "afmoe", tensors, changed)
        with pytest.raises(Unsupported, match=r"afmoe\.expert_weights_norm is not true, and transformers always normalises"):
            weightsmith.open_checkpoint(other)
