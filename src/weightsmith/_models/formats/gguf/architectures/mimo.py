"""MiMo V2: layers with a window have more heads of keys, a RoPE of their own, and sinks; all but a few have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weightsmith._base.errors import Unsupported
from weightsmith._models.formats.gguf.architectures.deepseek import EXPERT_NUMBERS
from weightsmith._models.formats.gguf.base.architecture import (
    SIGMOID_ROUTER,
    UNTIED,
    Contents,
    GgufArchitecture,
    GgufFamily,
    Windows,
    need_window,
)
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL, share_turned
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, EXPERTS, MLP, MLP_NORM, ROUTER, ROUTER_BIAS, WINDOWS
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_KV_HEADS, _LOCAL_BASE, _SCALE = "attention.head_count_kv", "rope.freq_base_swa", "attention.value_scale"
_SAME = {
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "swa_num_attention_heads": "num_attention_heads",
}
"""Settings of layers with a window, and those of all layers, which llama.cpp takes for both."""
_IN_FILE = ("expert_feed_forward_length", "expert_group_count", "expert_group_used_count")


class MimoV2(GgufArchitecture):
    """MiMo V2 Flash."""

    name = "mimo2"
    class_name = "MiMoV2FlashForCausalLM"
    model_types = ("mimo_v2_flash",)
    layer = {**ATTENTION, **MLP, **MLP_NORM, **ROUTER, **EXPERTS}
    bare = {**ROUTER_BIAS, "attn_sinks.weight": "self_attn.attention_sink_bias"}
    setting_names = {
        _KV_HEADS: "num_key_value_heads (twice as many in layers with a window)",
        "attention.value_length": "v_head_dim",
    }
    experts = "n_routed_experts"
    numbers = tuple(key for key in EXPERT_NUMBERS if key.name in _IN_FILE)
    constants = SIGMOID_ROUTER
    fixed = {
        **UNTIED,
        **{"attention_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    }
    partial = 1.0
    windows = Windows(6, stated=True)

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """As transformers reads the settings of published models, which have other names."""
        added, layers = dict[str, Any](), config.get("num_hidden_layers")
        pattern, span = config.get("hybrid_layer_pattern"), config.get("sliding_window_size")
        if config.get("layer_types") is None and type(layers) is int:
            slides = pattern if isinstance(pattern, list) else [i != 0 and (i + 1) % 6 != 0 for i in range(layers)]
            added["layer_types"] = ["sliding_attention" if here else "full_attention" for here in slides]
        if type(span) is int:  # so many tokens before each, and itself
            added["sliding_window"] = span + 1
        bases = {"full_attention": config.get("rope_theta"), "sliding_attention": config.get("swa_rope_theta")}
        if config.get("rope_parameters") is None and None not in bases.values():
            share = {"partial_rotary_factor": config.get("partial_rotary_factor")}
            added["rope_parameters"] = {
                kind: {"rope_type": "default", "rope_theta": base, **share} for kind, base in bases.items()
            }
        return {**config, **added}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        need_window(config)
        for local, name in _SAME.items():
            config.need(local, config.get(local, config.get(name)), config.get(name))
        heads = config.count("num_key_value_heads")
        config.need("swa_num_key_value_heads", config.get("swa_num_key_value_heads", 2 * heads), 2 * heads)
        full, local_rope = config.rope()
        config.need("rope_type", full["rope_type"], "default")
        config.need("rope_type of sliding_attention", local_rope.get("rope_type", "default"), "default")
        share = full.get("partial_rotary_factor")
        config.need("partial_rotary_factor of sliding_attention", local_rope.get("partial_rotary_factor", share), share)

    def check_local_rope(self, config: GgufConfig) -> None:
        """Layers that slide have a base of their own."""

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.u32("attention.key_length", config.count("head_dim"))
        keys.u32("attention.value_length", config.count("v_head_dim"))

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        heads = config.count("num_key_value_heads")
        keys.put(_KV_HEADS, "i32", [2 * heads if kind == "sliding_attention" else heads for kind in config.get("layer_types")])
        keys.f32(_LOCAL_BASE, config.number("rope_theta", within=config.rope()[1]))
        if config.get("attention_value_scale") is not None:
            keys.f32(_SCALE, config.number("attention_value_scale"))

    def take_size(self, values: GgufValues, config: dict[str, Any], name: str, setting: str) -> None:
        if name != _KV_HEADS:  # a number for each layer
            super().take_size(values, config, name, setting)

    def take_heads(self, values: GgufValues, config: dict[str, Any], default: int) -> int:
        config["head_dim"] = values.count("attention.key_length", default)
        config["v_head_dim"] = values.count("attention.value_length", default)
        return int(config["head_dim"])

    def take_tensors(self, config: dict[str, Any], contents: Contents, where: str) -> None:
        layers = range(config["num_hidden_layers"])
        sparse = [f"blk.{number}.ffn_gate_inp.weight" in contents.shapes for number in layers]
        config["mlp_layer_types"] = ["sparse" if has_experts else "dense" for has_experts in sparse]

    def take_attention(self, values: GgufValues, config: dict[str, Any]) -> None:
        config["sliding_window"] = values.count("attention.sliding_window")
        slides, heads = (_of_layers(values, name, config["num_hidden_layers"]) for name in (WINDOWS, _KV_HEADS))
        config["layer_types"] = ["sliding_attention" if here else "full_attention" for here in slides]
        full = min(heads)
        if heads != [2 * full if here else full for here in slides]:
            what = f"{self.name}.{_KV_HEADS} is not twice as large in layers with a window as in the others"
            raise Unsupported(what, where=values.where, fix=USE_ORIGINAL)
        config["num_key_value_heads"] = full

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        config.pop("partial_rotary_factor", None)
        width = config["head_dim"]
        share = share_turned(values.count("rope.dimension_count", width), width)
        bases = {"full_attention": config.pop("rope_theta"), "sliding_attention": values.float32(_LOCAL_BASE, 10_000.0)}
        config["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share} for kind, base in bases.items()
        }
        config["attention_value_scale"] = values.float32(_SCALE) if _SCALE in values else None


def _of_layers(values: GgufValues, name: str, layers: int) -> list[int]:
    """A number of each layer; the file may have more, of layers that predict. Raises FormatError."""
    stated = values.get(name)
    if not isinstance(stated, np.ndarray) or stated.ndim != 1 or stated.size < layers or stated.dtype.kind not in "biu":
        raise values.wrong(name, stated, f"not a whole number for each of {layers:,} layers")
    return [int(number) for number in stated[:layers]]


FAMILY = GgufFamily((MimoV2(),))
