"""Tiny dense models and the mixtures that are made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.zoo import HEADS, SIZES
from weightsmith._app.api import moe

LATENT = {
    **{key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
BIASED = {**SIZES, "attention_bias": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 6.0]}

# name → class without its ending, arguments
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama-scaled": ("Llama", {**SIZES, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}),
    "llama-linear": ("Llama", {**SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}}),
    "llama-biased": ("Llama", BIASED),
    "llama-wide": ("Llama", {**SIZES, "head_dim": 16}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": None}),
    "mistral-window": ("Mistral", {**SIZES, "sliding_window": 5}),
    "ministral": ("Ministral", {**HEADS, "sliding_window": 5, "layer_types": ["full_attention"] * 2}),
    "ministral-mixed": ("Ministral", {**HEADS, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2-window": ("Qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", HEADS),
    "qwen3-biased": ("Qwen3", {**BIASED, "head_dim": 16}),
    "qwen3-window": ("Qwen3", {**HEADS, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3-mixed": ("Qwen3", {**HEADS, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "phi3": ("Phi3", SIZES),
    "phi3-window": ("Phi3", {**SIZES, "sliding_window": 5}),
    "phi3-long": ("Phi3", {**SIZES, "rope_parameters": {**LONG}, "original_max_position_embeddings": 8}),
    "phi3-partial": ("Phi3", {**SIZES, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "granite": (
        "Granite",
        {
            **SIZES,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "granite-biased": ("Granite", {**BIASED, "attention_multiplier": 0.2}),
    "smollm3": ("SmolLM3", {**SIZES, "no_rope_layers": [1, 1]}),
    "smollm3-nope": ("SmolLM3", {**SIZES, "no_rope_layers": [1, 0]}),
    "seed_oss": ("SeedOss", HEADS),
    "olmo2": ("Olmo2", SIZES),
    "olmo2-biased": ("Olmo2", BIASED),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "first_k_dense_replace": 2}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 2, "num_mtp_layers": 0}),
    "deepseek_v3-halves": ("DeepseekV3", {**LATENT, "first_k_dense_replace": 2, "rope_interleave": False}),
    "youtu": (
        "Youtu",
        {**LATENT, "pad_token_id": None},
    ),  # transformers makes the pad token's row zero when it loads a tied one
    "youtu-biased": ("Youtu", {**LATENT, "pad_token_id": None, "q_lora_rank": None, "attention_bias": True}),
}


Dense = Callable[..., Path]
"""(name, seed = 0) → the folder of a model of `DENSE`."""


class Models:
    """Saved dense models, each made once, and their logits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[Path, torch.Tensor] = {}

    def logits(self, name: str, *, tied: bool = False) -> torch.Tensor:
        """See `logits`."""
        folder = self.dense(name, tied=tied)
        if folder not in self.known:
            self.known[folder] = logits(folder)
        return self.known[folder]

    def dense(self, name: str, *, tied: bool = False, down: float = 1.0, seed: int = 0) -> Path:
        """A model of `DENSE` in bf16 with numbers in every tensor. down: factor on the MLPs' last matrix."""
        out = self.folder / f"{name}-{tied}-{down}-{seed}"
        if not out.exists():
            kind, arguments = DENSE[name]
            config = getattr(transformers, f"{kind}Config")(**arguments, tie_word_embeddings=tied)
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
            torch.manual_seed(seed)
            for key, parameter in model.named_parameters():
                parameter.data = torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in key else 0.0)
                if "down_proj" in key:
                    parameter.data *= down
            model.to(torch.bfloat16).save_pretrained(out)
        return out


def recipe(base: Path, experts: int = 4, **keys: Any) -> dict[str, Any]:
    """A recipe whose experts are all the base."""
    return {
        "base_model": str(base),
        "experts": [{"source_model": str(base)}] * experts,
        "gate_mode": "random",
        **keys,
    }


def make_mixture(source: Mapping[str, Any], out: Path) -> list[str]:
    """Make the checkpoint. Returns the warnings."""
    return [warning.what for warning in moe(source, out).warnings]


def mixture(dense: Dense, architecture: str, name: str, shared: bool, out: Path, *, alike: bool, per_token: int = 2) -> Path:
    """Four experts, all the base or of three seeds. If they are alike the whole puts out what the base does."""
    halves = shared and architecture != "qwen2_moe"
    seeds = (0, 0, 0, 0) if alike else (0, 1, 2, 1)
    options = {"residual_scale": 0.5} if halves else {}
    source = recipe(dense(name), architecture=architecture, experts_per_token=per_token)
    source["experts"] = [{"source_model": str(dense(name, seed)), **options} for seed in seeds]
    if shared:
        source["shared_experts"] = [{"source_model": str(dense(name)), "residual_scale": 0.5 if halves else 0}]
    make_mixture(source, out)
    return out


def load(folder: Path) -> Any:
    """The model in float32, every key of it found and no other there."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, wrong
    return model.eval()


TOKENS = torch.from_numpy(np.random.default_rng(0).integers(3, 64, (2, 24)))


def logits(folder: Path) -> torch.Tensor:
    """Of `TOKENS`, float32 [2, 24, 64]. The arithmetic is float32 too, so that only the stored numbers count."""
    with torch.no_grad():
        predicted: torch.Tensor = load(folder)(TOKENS).logits
    return predicted


def config_of(folder: Path) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def edit_config(folder: Path, out: Path, edit: Any) -> Path:
    """A copy of a model with another config.json."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    config = config_of(folder)
    edit(config)
    (out / "config.json").write_text(json.dumps(config))
    return out


def edit_tensors(folder: Path, out: Path, edit: Any) -> Path:
    """A copy of a model with other tensors: `edit` changes the dict of them."""
    edit_config(folder, out, lambda config: None)
    tensors = load_file(out / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    return out
