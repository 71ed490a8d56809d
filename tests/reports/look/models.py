"""A small Llama, and what people make of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.mini import write_checkpoint

HIDDEN, INNER, LAYERS, TOKENS = 160, 320, 4, 300
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "vocab_size": TOKENS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
VOCABULARY = {f"t{i}": i for i in range(TOKENS)}

Tensors = dict[str, np.ndarray]
Change = Callable[[str, np.ndarray], np.ndarray]


def is_linear(name: str) -> bool:
    return "_proj" in name


def weights() -> Tensors:
    """float32 values that bf16 holds."""
    random = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (TOKENS, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{p}_proj.weight": (HIDDEN, HIDDEN) for p in "qkvo"}
        shapes |= {f"{layer}mlp.{p}_proj.weight": (INNER, HIDDEN) for p in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (HIDDEN, INNER), f"{layer}input_layernorm.weight": (HIDDEN,)}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (TOKENS, HIDDEN)}
    tensors = {n: random.standard_normal(s) * 0.02 + (1 if len(s) == 1 else 0) for n, s in shapes.items()}
    return {name: tensor.astype(ml_dtypes.bfloat16).astype(np.float32) for name, tensor in tensors.items()}


def low_rank(rank: int, seed: int, size: float = 0.03) -> Change:
    """Adds a product of random factors to linear layers; its norm is about `size` of the weight's."""

    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        if not is_linear(name):
            return np.zeros_like(tensor)
        random = np.random.default_rng([seed, *name.encode()])
        product = random.standard_normal((tensor.shape[0], rank)) @ random.standard_normal((rank, tensor.shape[1]))
        return product * (size * np.linalg.norm(tensor) / np.linalg.norm(product))

    return change


def trained(name: str, tensor: np.ndarray) -> np.ndarray:
    """A change of full rank whose singular values fall slowly, as of full fine-tuning; norms change too."""
    random = np.random.default_rng([1, *name.encode()])
    noise = random.standard_normal(tensor.shape)
    if tensor.ndim == 2:
        u, _, vt = np.linalg.svd(noise, full_matrices=False)
        noise = (u / np.arange(1, u.shape[1] + 1) ** 0.5) @ vt
    return noise * (0.02 * np.linalg.norm(tensor) / np.linalg.norm(noise))


def save(folder: Path, tensors: Tensors, dtype: Any = ml_dtypes.bfloat16, config: dict[str, Any] = CONFIG) -> Path:
    """A checkpoint with a tokenizer."""
    write_checkpoint(folder, {name: tensor.astype(dtype) for name, tensor in tensors.items()}, config)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": VOCABULARY, "merges": []}}))
    return folder


def changed(folder: Path, change: Change, dtype: Any = ml_dtypes.bfloat16) -> Path:
    """The model with a change added."""
    return save(folder, {name: tensor + change(name, tensor) for name, tensor in weights().items()}, dtype)
