"""Gemma 4: layers that attend to everything have wider heads, and fewer of keys and values.

Transformers writes what is different in them to `per_layer_config`; published files say `global_head_dim` and
`num_global_key_value_heads`. In these layers, RoPE turns only some pairs of each half of a head. llama.cpp turns all, and
divides the frequencies of the others by a huge number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weightsmith._models.formats.gguf.values import Config, Floats, Put

_STILL = 1e30
"""By which frequencies are divided so that nothing turns."""


def put_gemma4(given: Config, put: Put) -> Mapping[str, Floats]:
    """The keys of a GGUF file, and a tensor that the model has not. Raises FormatError, Unsupported."""
    layers, slides = given.count("num_hidden_layers"), _slides(given)
    wide, kv_heads = _global(given, "head_dim", 512), _global(given, "num_key_value_heads", 0)
    narrow = given.count("head_dim", 256)
    for name in ("key", "value"):
        put(f"attention.{name}_length", "u32", wide)
        put(f"attention.{name}_length_swa", "u32", narrow)
    own = given.count("num_key_value_heads", given.count("num_attention_heads"))
    if kv_heads:
        put("attention.head_count_kv", "i32", [own if each else kv_heads for each in slides])
    put("rope.dimension_count", "u32", wide)
    put("rope.dimension_count_swa", "u32", narrow)
    rope, local = given.rope()
    put("rope.freq_base_swa", "f32", given.number("rope_theta", 10_000.0, local))
    shared = given.count("num_kv_shared_layers", 0, least=0)
    put("attention.shared_kv_layers", "u32", shared)
    if given.get("use_double_wide_mlp", False):
        width = given.count("intermediate_size")
        put("feed_forward_length", "i32", [width * (1 if i < layers - shared else 2) for i in range(layers)])
    put("embedding_length_per_layer_input", "u32", given.count("hidden_size_per_layer_input", 0, least=0))
    tokens = given.count("vocab_size")
    if given.count("hidden_size_per_layer_input", 0, least=0):
        given.need("vocab_size_per_layer_input", given.get("vocab_size_per_layer_input", tokens), tokens)
    if given.get("final_logit_softcapping") is not None:
        put("final_logit_softcapping", "f32", given.number("final_logit_softcapping"))
    if given.get("enable_moe_block", False):
        put("expert_count", "u32", given.count("num_experts"))
        put("expert_used_count", "u32", given.count("top_k_experts"))
        put("expert_feed_forward_length", "u32", given.count("moe_intermediate_size"))
    given.need("use_bidirectional_attention", given.get("use_bidirectional_attention") == "all", False)
    given.need("rope_type", rope["rope_type"], "proportional")
    turned = int(wide * given.number("partial_rotary_factor", 1.0, rope) / 2)
    return {"rope_freqs.weight": np.array([1.0] * turned + [_STILL] * (wide // 2 - turned), np.float32)}


def _slides(given: Config) -> list[bool]:
    """Whether each layer attends to a window alone."""
    layers = given.count("num_hidden_layers")
    types = given.get("layer_types") or ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise given.wrong("layer_types", types, f"and not one for each of {layers:,} layers")
    return [each == "sliding_attention" for each in types]


def _global(given: Config, name: str, default: int) -> int:
    """A number of the layers that attend to everything; `default`, which may be 0, where config.json does not say it."""
    per_layer: Any = given.get("per_layer_config")
    if not isinstance(per_layer, dict):
        return given.count(f"num_global_{name[4:]}" if name.startswith("num_") else f"global_{name}", default, least=0)
    found = [
        each.get(name)
        for i, slides in enumerate(_slides(given))
        if not slides and isinstance(each := per_layer.get(str(i)), dict)
    ]
    if any(each != found[0] for each in found):
        raise given.wrong("per_layer_config", per_layer, f"and not one {name} for all layers that attend to everything")
    return given.count(name, default, {name: found[0] if found else None}, least=0)
