"""Gemma 4: layers that attend to everything have wider heads, and fewer of keys and values.

Transformers writes what is different in them to `per_layer_config`; published files say `global_head_dim` and
`num_global_key_value_heads`. In these layers, RoPE turns only some pairs of each half of a head. llama.cpp turns all, and
divides the frequencies of the others by a huge number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weightsmith._base.errors import Unsupported
from weightsmith._models.formats.gguf.values import Config, Floats, Put, Values

_STILL = 1e30
"""By which frequencies are divided so that nothing turns."""


def put_gemma4(given: Config, put: Put) -> Mapping[str, Floats]:
    """The keys of a GGUF file, and the extra tensor that llama.cpp expects. Raises FormatError, Unsupported."""
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


def take_gemma4(
    found: Values, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, Floats]
) -> None:
    """The settings of config.json. Raises FormatError, Unsupported."""
    layers = config["num_hidden_layers"]
    slides = [each == "sliding_attention" for each in config["layer_types"]]
    wide, config["head_dim"] = found.count("attention.key_length"), found.count("attention.key_length_swa")
    config["global_head_dim"] = wide
    heads = found.by_layer("attention.head_count_kv", layers)
    own, others = ({n for n, each in zip(heads, slides, strict=True) if each == local} for local in (True, False))
    shared = config["num_kv_shared_layers"] = found.count("attention.shared_kv_layers", 0, least=0)
    widths = found.by_layer("feed_forward_length", layers)
    double = [widths[0] * (1 if i < layers - shared else 2) for i in range(layers)]
    if len(own) > 1 or len(others) > 1 or widths not in ([widths[0]] * layers, double):
        what = "layers of one kind with different numbers of heads, or MLPs of other widths"
        raise Unsupported(what, where=found.where, fix="Use the original checkpoint.")
    config["num_key_value_heads"] = next(iter(own or others))
    config["num_global_key_value_heads"] = next(iter(others or own))
    config["attention_k_eq_v"] = any(
        f"blk.{i}.attn_k.weight" in shapes and f"blk.{i}.attn_v.weight" not in shapes for i in range(layers)
    )
    config["intermediate_size"], config["use_double_wide_mlp"] = widths[0], widths == double and shared > 0
    config["hidden_size_per_layer_input"] = found.count("embedding_length_per_layer_input", 0, least=0)
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    if "final_logit_softcapping" in found:
        config["final_logit_softcapping"] = found.float32("final_logit_softcapping")
    config["enable_moe_block"] = "expert_count" in found
    if config["enable_moe_block"]:
        config["num_experts"], config["top_k_experts"] = found.count("expert_count"), found.count("expert_used_count")
        config["moe_intermediate_size"] = found.count("expert_feed_forward_length")
    turned = factors.get("rope_freqs.weight")
    share = 1.0 if turned is None else float(2 * np.count_nonzero(turned == 1) / wide)
    config["rope_parameters"] = {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": share,
            "rope_theta": config.pop("rope_theta"),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": found.float32("rope.freq_base_swa", 10_000.0)},
    }


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
