"""The models of the notebooks: a Llama of 2.4 million random weights, and what three trainings might have made of it.

Nothing here was trained. Each change has the form that its training would give it, so that one knows what must be found.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

import weightsmith

HIDDEN, INNER, LAYERS, TOKENS = 192, 384, 6, 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": TOKENS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")

Tensors = dict[str, np.ndarray]


def base_model(folder: Path) -> Path:
    """The base, in bf16."""
    random = np.random.default_rng(0)
    return _save(folder, {n: random.standard_normal(s) * 0.02 + (len(s) == 1) for n, s in shapes().items()})


def tuned_in_full(folder: Path, base: Path) -> Path:
    """A fine-tune of all linear layers, whose change has full rank."""

    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        if not name.endswith("_proj.weight"):
            return np.zeros_like(tensor)
        u, _, vt = np.linalg.svd(_random(name, 1).standard_normal(tensor.shape), full_matrices=False)
        return _scaled((u / np.arange(1, u.shape[1] + 1) ** 0.5) @ vt, tensor)

    return _save(folder, {name: tensor + change(name, tensor) for name, tensor in _read(base).items()})


def adapter(folder: Path, base: Path, rank: int, modules: tuple[str, ...] = ATTENTION + MLP, *, seed: int) -> Path:
    """A LoRA adapter of a base, as PEFT saves it."""
    factors: Tensors = {}
    for name, tensor in _read(base).items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            random = _random(name, seed)
            a, b = random.standard_normal((rank, tensor.shape[1])), random.standard_normal((tensor.shape[0], rank))
            b *= np.linalg.norm(_scaled(b @ a, tensor)) / np.linalg.norm(b @ a)
            factors |= {
                f"base_model.model.{module}.lora_{which}.weight": x.astype(np.float32) for which, x in (("A", a), ("B", b))
            }
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(modules),
        "task_type": "CAUSAL_LM",
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weightsmith.save_file(factors, folder / "adapter_model.safetensors")
    return folder


def shapes() -> dict[str, tuple[int, ...]]:
    """Of every tensor of the base."""
    by_name: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (TOKENS, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        by_name |= {f"{layer}self_attn.{part}.weight": (HIDDEN, HIDDEN) for part in ATTENTION}
        by_name |= {f"{layer}mlp.{part}.weight": (INNER, HIDDEN) for part in MLP[:2]}
        by_name |= {f"{layer}mlp.down_proj.weight": (HIDDEN, INNER)}
        by_name |= {f"{layer}{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
    return by_name | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (TOKENS, HIDDEN)}


def _random(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _scaled(change: np.ndarray, tensor: np.ndarray) -> np.ndarray:
    """A change with 3% of the tensor's norm."""
    return change * (0.03 * np.linalg.norm(tensor) / np.linalg.norm(change))


def _read(folder: Path) -> Tensors:
    with weightsmith.open_checkpoint(folder) as model:
        return {name: model.read(name).astype(np.float64) for name in model.specs}


def _save(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    weightsmith.save_file({name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}, folder / "model.safetensors")
    vocabulary = {f"token{i}": i for i in range(TOKENS)}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}))
    return folder
