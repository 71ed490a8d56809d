"""Adapters: their configuration and weights, two merged into one, and files of LoRA factors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.fuzz.kind import Kind, Rng, merge
from scripts.fuzz.models import make_models
from scripts.fuzz.mutators import mutate_json, mutate_safetensors


def _use_adapter(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    recipe = {"merge_method": "passthrough", "models": [{"model": "a+lora"}]}
    yield lambda: weightsmith.plan(recipe)
    if rng.random() < 0.2:
        yield lambda: merge(recipe)


def make_adapters(*, fresh: bool = True) -> None:
    """`lora` and `lora2`, adapters of the same modules with different ranks."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    if fresh:
        make_models()
    shutil.copytree("lora", "lora2")
    name = "lora2/adapter_model.safetensors"
    save_file({key: np.concatenate([x, x], 0 if "lora_A" in key else 1) for key, x in load_file(name).items()}, name)
    config = json.loads(Path("lora2/adapter_config.json").read_text())
    Path("lora2/adapter_config.json").write_text(json.dumps(config | {"r": 8, "rank_pattern": {}, "use_rslora": True}))


def mutate_adapter(rng: Rng, data: bytes) -> bytes:
    """Another configuration, or other weights."""
    return mutate_json(rng, data, _ADAPTER_WORDS) if data.startswith(b"{") else mutate_safetensors(rng, data)


def _use_adapters(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    method = rng.choice(("linear", "ties", "dare_ties", "della"))
    models = [{"model": name, "parameters": {"weight": 0.5}} for name in ("lora", "lora2")]
    recipe = {"merge_method": method, "models": models}
    yield lambda: weightsmith.plan(recipe)
    if rng.random() < 0.2:
        yield lambda: merge(recipe, adapter_rank=rng.choice((None, 2)))


def _make_factor_files() -> None:
    """`one` and `two`, files of LoRA factors in kohya's names and in diffusers', and `model`, which has the modules."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(4)
    save_file({"blocks.0.q.weight": rng.standard_normal((6, 8), np.float32)}, "model.safetensors")
    stated = {"lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 4})}
    for name, rank in (("one", 2), ("two", 3)):
        factors = {"lora_down.weight": (rank, 8), "lora_up.weight": (6, rank), "alpha": (1,)}
        for beginning, stem in (("lora_unet_blocks_0_q", name), ("transformer.blocks.0.q", f"{name}-dotted")):
            tensors = {f"{beginning}.{end}": rng.standard_normal(shape, np.float32) for end, shape in factors.items()}
            save_file(tensors, f"{stem}.safetensors", metadata=stated if "." in beginning and rank == 2 else None)


def _use_factor_files(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
    import weightsmith

    other = file.replace("one", "two")
    recipe = {"merge_method": rng.choice(("linear", "ties")), "models": [{"model": file}, {"model": other}]}
    for entry in recipe["models"]:
        entry["parameters"] = {"weight": 0.5}
    yield lambda: weightsmith.plan(recipe)
    yield lambda: weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"model.safetensors+{file}"}]})
    yield lambda: weightsmith.inspect(file)
    if rng.random() < 0.2:
        yield lambda: merge(recipe)


_ADAPTER_WORDS = ("r", "rank_pattern", "alpha_pattern", "use_dora", "modules_to_save", "q_proj", "base_model_name_or_path")


KINDS = {
    "adapter-config": Kind(
        make_models,
        ("lora/adapter_config.json",),
        lambda rng, data: mutate_json(rng, data, _ADAPTER_WORDS),
        _use_adapter,
    ),
    "adapter-weights": Kind(make_models, ("lora/adapter_model.safetensors",), mutate_safetensors, _use_adapter),
    "adapters": Kind(
        make_adapters, ("lora2/adapter_config.json", "lora2/adapter_model.safetensors"), mutate_adapter, _use_adapters
    ),
    "factor-files": Kind(
        _make_factor_files, ("one.safetensors", "one-dotted.safetensors"), mutate_safetensors, _use_factor_files
    ),
}
