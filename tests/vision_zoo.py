"""Tiny models for images, under the names that published ones have; their numbers depend on nothing but the names."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from tests.mini import write_checkpoint
from weightsmith._base.tensors import DTYPES

WIDTH, INNER, HEADS, TOKENS, LAYERS = 32, 48, 4, 262, 2
BF16 = DTYPES["BF16"].numpy
Shapes = dict[str, tuple[int, ...]]
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": TOKENS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "image_size": 32,
    "patch_size": 8,
}
PROCESSOR = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.5, 0.75]}
TOKENIZER = {**BYTE_LEVEL, "tokenizer.ggml.tokens": [*BYTE_LEVEL["tokenizer.ggml.tokens"][:-1], "[IMG_BREAK]"]}


def text(prefix: str, *, norms: tuple[str, ...] = (), bias: bool = False) -> Shapes:
    """The language model: one layer, a tied head."""
    layer = f"{prefix}layers.0."
    found: Shapes = {f"{prefix}embed_tokens.weight": (TOKENS, WIDTH), f"{prefix}norm.weight": (WIDTH,)}
    found |= {f"{layer}{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm", *norms)}
    found |= {f"{layer}self_attn.{each}_proj.weight": (WIDTH, WIDTH) for each in "qo"}
    found |= {f"{layer}self_attn.{each}_proj.weight": (WIDTH // 2, WIDTH) for each in "kv"}
    found |= {f"{layer}self_attn.{each}_proj.bias": (WIDTH // (1 if each == "q" else 2),) for each in ("qkv" if bias else "")}
    found |= {f"{layer}mlp.{each}_proj.weight": (INNER, WIDTH) for each in ("gate", "up")}
    return found | {f"{layer}mlp.down_proj.weight": (WIDTH, INNER)}


def module(name: str, *shape: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def siglip(prefix: str) -> Shapes:
    """A tower of SigLIP."""
    found = module(f"{prefix}embeddings.patch_embedding", WIDTH, 3, 8, 8) | module(f"{prefix}post_layernorm", WIDTH)
    found |= module(f"{prefix}embeddings.position_embedding", 16, WIDTH, bias=False)
    for i in range(LAYERS):
        layer = f"{prefix}encoder.layers.{i}."
        found |= module(f"{layer}layer_norm1", WIDTH) | module(f"{layer}layer_norm2", WIDTH)
        found |= module(f"{layer}mlp.fc1", INNER, WIDTH) | module(f"{layer}mlp.fc2", WIDTH, INNER)
        for each in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= module(f"{layer}self_attn.{each}", WIDTH, WIDTH)
    return found


def gemma3() -> tuple[Shapes, dict[str, Any], dict[str, Any]]:
    shapes = text("language_model.model.", norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"))
    shapes |= {f"language_model.model.layers.0.self_attn.{each}_norm.weight": (8,) for each in "qk"}
    shapes |= siglip("vision_tower.vision_model.") | {"multi_modal_projector.mm_input_projection_weight": (WIDTH, WIDTH)}
    shapes |= {"multi_modal_projector.mm_soft_emb_norm.weight": (WIDTH,)}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "text_config": {**TEXT, "model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 16},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
    }
    return shapes, config, {**PROCESSOR, "image_seq_length": 4}


MODELS = {"gemma3": gemma3}


def tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Numbers from -1/4 to 1/4."""
    start = zlib.crc32(f"{seed} {name}".encode())
    raw = (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(start)) * np.uint64(2654435761)
    return ((raw % np.uint64(8192)).astype(np.float32) / 16384 - 0.25).reshape(shape).astype(BF16)


def save(name: str, folder: Path, seed: int = 0, *, rename: Mapping[str, str] | None = None, **changes: Any) -> Path:
    """A model of `MODELS`, with its tokenizer and processor. changes: of its config.json."""
    shapes, config, processor = MODELS[name]()
    tensors = {spec: tensor(spec, shape, seed) for spec, shape in shapes.items()}
    for here, there in (rename or {}).items():
        tensors = {spec.replace(here, there, 1): values for spec, values in tensors.items()}
    write_checkpoint(folder, tensors, {**config, **changes})
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    for file, data in tokenizer_files(TOKENIZER).items():
        (folder / file).write_bytes(data)
    return folder


def save_for_converter(name: str, folder: Path) -> Path:
    """The same under names that llama.cpp's converter looks for."""
    return save(name, folder)


NEWER: dict[str, dict[str, str]] = {
    "gemma3": {
        "vision_tower.vision_model.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "language_model.model.": "model.language_model.",
    }
}
"""Beginnings of names: those of the files above → those that transformers 5 has in memory, or writes."""
