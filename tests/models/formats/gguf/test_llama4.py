"""Llama 4: published files, RoPE scaled without frequencies between, and settings that llama.cpp does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files, write_gguf
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from weightsmith._base.errors import PlanError, Unsupported
from weightsmith._models.formats.gguf.header import read_gguf_header

SCOUT = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
SCOUT |= {"original_max_position_embeddings": 8192}


def saved(folder: Path, **changes: Any) -> Path:
    source = zoo.save("llama4", folder, 1, vocab_size=262, dtype="float32")
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(config))
    return source


def written(source: Path) -> Path:
    weightsmith.quantize(source, source.parent / "q", "gguf-f32", progress=False)
    return source.parent / "q" / "model.gguf"


def published(source: Path) -> None:
    """As Meta publishes Scout: within a model for images, with settings that follow from others left out or empty."""
    config = json.loads((source / "config.json").read_text())
    for name in ("layer_types", "moe_layers", "no_rope_layer_interval", "rope_parameters", "architectures"):
        del config[name]
    config |= {"no_rope_layers": [], "attn_temperature_tuning": 4, "rope_theta": 500000.0, "rope_scaling": SCOUT}
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors = {f"language_model.{name}": checkpoint.read(name) for name in checkpoint.specs}
    tensors["vision_model.class_embedding"] = np.zeros(8, np.float32)
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": config}
    write_checkpoint(source, tensors, {**whole, "vision_config": {"model_type": "llama4_vision_model"}})


@needs_llama_cpp
@pytest.mark.long
def test_scout_as_published(tmp_path: Path) -> None:
    """It is what transformers saves of its language model; llama.cpp computes the same, and the scaling comes back."""
    import torch

    plain = saved(tmp_path / "plain" / "m", rope_parameters={**SCOUT, "rope_theta": 500000.0})
    expected = written(plain)
    source = saved(tmp_path / "m")
    published(source)
    path = written(source)
    assert stored(path) == stored(expected)
    prefix = "llama4."
    keys = [
        {name: str(value) for name, value in read_gguf_header(file).keys.items() if name.startswith(prefix)}
        for file in (path, expected)
    ]
    assert keys[0] == keys[1]
    with weightsmith.open_checkpoint(path) as back:
        assert back.config is not None
        assert back.config["rope_scaling"] == SCOUT
    model, missing = zoo.load("llama4", plain)
    assert not any(missing.values())
    tokens = np.random.default_rng(0).integers(0, 256, 40).tolist()
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(path) as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_chunk_size": 4096}, "attention_chunk_size is 4096, and llama.cpp takes 8192 for granted"),
        ({"floor_scale": 4096}, "floor_scale is 4096, and llama.cpp takes 8192 for granted"),
        ({"attn_temperature_tuning": False}, "attn_temperature_tuning is False, and llama.cpp takes True for granted"),
        ({"attention_bias": True}, "attention_bias is True, and llama.cpp takes False for granted"),
        ({"use_qk_norm": False}, "use_qk_norm is False, and llama.cpp takes True for granted"),
        ({"num_local_experts": 128}, "use_qk_norm is True, and llama.cpp takes False for granted"),
        ({"no_rope_layers": [1] * 5}, r"no_rope_layers is \[1, 1, 1, 1, 1\], and llama.cpp takes \[1, 1, 1, 0, 1\]"),
        ({"layer_types": ["full_attention"] * 5}, r"layer_types is \['full_attention', .*, and llama.cpp takes"),
        ({"moe_layers": [2, 4]}, r"moe_layers is \[2, 4\], and llama.cpp takes \[1, 3\] for granted"),
        (
            {"interleave_moe_layer_step": 1, "moe_layers": None},
            "interleave_moe_layer_step is 1, and layer 0 has no experts",
        ),
        ({"intermediate_size": 64}, "intermediate_size is 64 in config.json"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        written(saved(tmp_path / "m", **changes))


def test_a_file_whose_layers_attend_to_everything(tmp_path: Path) -> None:
    """llama.cpp reads a window of 0 so; transformers would attend to chunks."""
    reader = gguf.GGUFReader(written(saved(tmp_path / "m")))
    keys = {name.removeprefix("llama4."): field.contents() for name, field in reader.fields.items()}
    kept = {name: value for name, value in keys.items() if not name.startswith("GGUF.") and name != "general.architecture"}
    tensors = {tensor.name: (np.array(tensor.data), "F32") for tensor in reader.tensors}
    for window, words in ((8192, ""), (0, r"llama4\.attention\.sliding_window is 0, and transformers has layers")):
        file = write_gguf(tmp_path / "other.gguf", "llama4", tensors, kept | {"attention.sliding_window": window})
        if words:
            with pytest.raises(Unsupported, match=words):
                weightsmith.open_checkpoint(file)
        else:
            weightsmith.open_checkpoint(file).close()
