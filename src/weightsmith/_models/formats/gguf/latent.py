"""DeepSeek's attention, whose keys and values are made of a common latent vector.

llama.cpp multiplies queries into the latent space instead. There, the model has one head of keys and values: the latent vector
and what RoPE turns. Of `kv_b_proj`, the rows of keys are stored transposed, apart from those of values (`cuts.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsmith._models.formats.gguf.values import Config, Put, Values

_LOG = "rope.scaling.yarn_log_multiplier"


def put_latent(given: Config, put: Put) -> None:
    """The keys of a GGUF file. Raises FormatError, Unsupported."""
    heads, rank, turned = (given.count(name) for name in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"))
    given.need("num_key_value_heads", given.count("num_key_value_heads", heads), heads)
    layers, tokens = given.count("num_hidden_layers"), given.count("vocab_size")
    light = layers in (26, 27) or (layers, tokens) == (48, 128_256)  # by which llama.cpp knows that queries have no such vector
    given.need("q_lora_rank", "none" if given.get("q_lora_rank") is None else "a number", "none" if light else "a number")
    put("vocab_size", "u32", tokens)
    put("attention.head_count_kv", "u32", 1)
    put("attention.kv_lora_rank", "u32", rank)
    if given.get("q_lora_rank") is not None:
        put("attention.q_lora_rank", "u32", given.count("q_lora_rank"))
    put("attention.key_length", "u32", rank + turned)
    put("attention.value_length", "u32", rank)
    put("attention.key_length_mla", "u32", given.count("qk_nope_head_dim") + turned)
    put("attention.value_length_mla", "u32", given.count("v_head_dim"))
    put("rope.dimension_count", "u32", turned)
    rope, _ = given.rope()
    if rope["rope_type"] == "yarn":
        given.need("mscale", rope.get("mscale"), rope.get("mscale_all_dim"))
        put(_LOG, "f32", 0.1 * given.number("mscale_all_dim", None, rope))


def take_latent(found: Values, config: dict[str, Any], *_: object) -> None:
    """The settings of config.json. Raises FormatError."""
    config["num_key_value_heads"] = config["num_attention_heads"]
    turned = config["qk_rope_head_dim"] = config["head_dim"] = found.count("rope.dimension_count")
    config["kv_lora_rank"] = found.count("attention.kv_lora_rank")
    config["q_lora_rank"] = found.count("attention.q_lora_rank") if "attention.q_lora_rank" in found else None
    whole = found.count("attention.key_length_mla", least=turned + 1)
    config["qk_nope_head_dim"] = whole - turned
    config["v_head_dim"] = found.count("attention.value_length_mla")
    if scaling := config.get("rope_scaling"):
        scaling["mscale"] = scaling["mscale_all_dim"] = float(str(np.float32(10 * found.number(_LOG))))
