"""Mellum 2: Qwen3's experts, and layers with a window, whose RoPE is not scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._models.formats.gguf.base.architecture import UNTIED, Contents, GgufArchitecture, GgufFamily, GgufKey, Windows
from weightsmith._models.formats.gguf.base.rope import state_by_kind
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, EXPERTS, HEAD_NORMS, MLP_NORM, ROUTER
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_LOCAL_BASE = "rope.freq_base_swa"


class Mellum(GgufArchitecture):
    """Mellum 2; llama.cpp reads a base of RoPE for layers with a window, and has that of the others in both."""

    name = "mellum"
    class_name = "MellumForCausalLM"
    model_types = ("mellum",)
    layer = {**ATTENTION, **HEAD_NORMS, **MLP_NORM, **ROUTER, **EXPERTS}
    experts = "num_experts"
    numbers = (GgufKey("expert_feed_forward_length", "moe_intermediate_size"),)
    fixed = {**UNTIED, "attention_bias": False, "norm_topk_prob": True}
    windows = Windows(4, stated=True)

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        layers = config.get("num_hidden_layers")
        if config.get("layer_types") is not None or type(layers) is not int:
            return config
        return {**config, "layer_types": ["full_attention"] * layers}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        layers = config.count("num_hidden_layers")
        sparse = ["sparse"] * layers
        config.need("mlp_layer_types", config.get("mlp_layer_types", sparse), sparse)

    def check_local_rope(self, config: GgufConfig) -> None:
        if "sliding_attention" in config.get("layer_types"):
            config.count("sliding_window")
            config.need("rope_type of sliding_attention", config.rope()[1].get("rope_type", "default"), "default")
            super().check_local_rope(config)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        full, local = config.rope()
        keys.f32(_LOCAL_BASE, config.number("rope_theta", config.number("rope_theta", within=full), local))

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        state_by_kind(config, values.float32(_LOCAL_BASE, config["rope_theta"]))


FAMILY = GgufFamily((Mellum(),))
