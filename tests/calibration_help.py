"""Tiny models with a tokenizer, and short ways to calibrate them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.zoo import SIZES
from weightsmith.execution import Merged, execute
from weightsmith.options import QuantizeSettings, RecipeOptions, RunOptions
from weightsmith.planner import Prepared, assemble
from weightsmith.quantisation import quantised

TINY = {**SIZES, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96}
TEXT = " ".join(f"The {word} has {n} {word}s, and {n * n} more." for n, word in enumerate("cat dog bird fish".split() * 9))
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "biased": lambda: transformers.LlamaConfig(**TINY, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=8),
    "qwen2": lambda: transformers.Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**TINY, head_dim=16, sliding_window=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**TINY, head_dim=16, sliding_window=8),
    "phi3": lambda: transformers.Phi3Config(**TINY),
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=4),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **{**TINY, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    ),
}


def save_model(folder: Path, name: str = "llama", seed: int = 0) -> Path:
    """A random model with a tokenizer of bytes."""
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).to(torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def settings(folder: Path, **more: Any) -> QuantizeSettings:
    """A calibration with a short text."""
    (folder / "text.txt").write_text(TEXT)
    default = {
        "bits": 4.1,
        "calibration": str(folder / "text.txt"),
        "calibration_rows": 6,
        "calibration_tokens": 16,
        "uniform": True,
    }
    return QuantizeSettings(**default | more)


def prepared_for(source: Any, given: QuantizeSettings, name: str = "exl2", seed: int = 0) -> Prepared:
    """The plan of a quantised model. source: its folder, or a recipe."""
    recipe = source if isinstance(source, Mapping) else {"merge_method": "passthrough", "models": [{"model": str(source)}]}
    return quantised(lambda: assemble(recipe, RecipeOptions(seed=seed)), name, given).finish()


def quantise(source: Any, out: Path, given: QuantizeSettings, threads: int = 2, **more: Any) -> Merged:
    """Make it."""
    with prepared_for(source, given, **more) as prepared:
        return execute(prepared, out, RunOptions(threads=threads, card=False))
