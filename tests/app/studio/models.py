"""Folders with models, an adapter and things that are none, as a studio is started with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import weightsmith
from tests.reports.look.models import CONFIG, LAYERS, low_rank, save, weights
from tests.tokenizer_help import files, trained, write
from weightsmith._app.studio.places import Places


def make(root: Path) -> Places:
    """`models/base`, two fine-tunes, an adapter; `secret` outside; results in `out`."""
    models = root / "models"
    for folder, change in (
        (models / "base", None),
        (models / "fr", low_rank(8, 0)),
        (models / "de", low_rank(8, 1)),
        (root / "secret", low_rank(4, 2)),
    ):
        tensors = {name: tensor + (change(name, tensor) if change else 0) for name, tensor in weights().items()}
        for i in range(LAYERS):  # for transformers
            tensors[f"model.layers.{i}.post_attention_layernorm.weight"] = np.ones(CONFIG["hidden_size"])
        write(save(folder, tensors), files(trained(size=280)))
    adapter(models / "adapters" / "py")
    (models / "notes").mkdir()
    (models / "notes" / "config.json").write_text("{}")
    return Places.of([models], root / "out", hub=False)


def adapter(folder: Path) -> None:
    """A LoRA adapter of the base."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(5)
    tensors = {}
    for i in range(LAYERS):
        name = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = random.standard_normal((4, CONFIG["hidden_size"]), np.float32)
        tensors[f"{name}.lora_B.weight"] = random.standard_normal((CONFIG["hidden_size"], 4), np.float32) * 0.01
    weightsmith.save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(about))


def recipe(root: Path, *extra_lines: str) -> str:
    """A TIES merge of the base and two fine-tunes."""
    lines = ["merge_method: ties", f"base_model: {root}/models/base", "models:"]
    for name in ("fr", "de"):
        lines += [f"  - model: {root}/models/{name}", "    parameters: {weight: 1.0, density: 0.5}"]
    return "\n".join([*lines, *extra_lines, "dtype: bfloat16", ""])
