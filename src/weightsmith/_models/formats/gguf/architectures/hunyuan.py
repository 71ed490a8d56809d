"""Hunyuan's models, with and without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture, GgufFamily, GgufKey, head_dim
from weightsmith._models.formats.gguf.base.tensors import EXPERTS, LLAMA_LAYER, MLP
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys

_ALPHA, _STATED, _USABLE = 1000, 32 * 1024, 256 * 1024
"""Published models with this alpha work with so many tokens, although config.json states fewer."""


class HunyuanDense(GgufArchitecture):
    """Hunyuan without experts, whose RoPE has another base instead of scaled frequencies."""

    name = "hunyuan-dense"
    class_name = "HunYuanDenseV1ForCausalLM"
    model_types = ("hunyuan_v1_dense",)
    layer = LLAMA_LAYER | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    fixed = {"attention_bias": False, "mlp_bias": False}

    def put_sizes(self, config: GgufConfig, keys: GgufKeys) -> None:
        super().put_sizes(config, keys)
        rope = super().rope(config)
        scaled = rope["rope_type"] == "dynamic" and rope.get("alpha") == _ALPHA
        if scaled and config.count("max_position_embeddings") == _STATED:
            keys.u32("context_length", _USABLE)

    def rope(self, config: GgufConfig) -> dict[str, Any]:
        rope = super().rope(config)
        if rope["rope_type"] != "dynamic" or rope.get("alpha") is None:
            return rope
        alpha, width = config.number("alpha", None, rope), head_dim(config)
        base = config.number("rope_theta", within=rope) * (alpha ** (width / (width - 2)) if width > 2 else 1.0)
        if base >= 3e38:
            raise config.wrong("alpha", alpha, f"with which float32 cannot hold the base of RoPE, {base:g}")
        return {**rope, "rope_type": "default", "rope_theta": base}


_LISTED = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
"""Numbers that published models state for each layer."""


class HunyuanMoe(HunyuanDense):
    """Hunyuan A13B: experts, and an MLP that all tokens share, of one width."""

    name = "hunyuan-moe"
    class_name = "HunYuanMoEV1ForCausalLM"
    model_types = ("hunyuan_v1_moe",)
    layer = {
        **{name: module for name, module in HunyuanDense.layer.items() if name not in MLP},
        **{**EXPERTS, "ffn_gate_inp": "mlp.gate.wg"},
        **{f"{name}_shexp": module.replace("mlp.", "mlp.shared_mlp.") for name, module in MLP.items()},
    }
    experts = "num_experts"
    experts_used = "moe_topk"
    numbers = (
        GgufKey("expert_feed_forward_length", "intermediate_size"),
        GgufKey("expert_shared_feed_forward_length", "intermediate_size"),
    )
    constants = {"expert_shared_count": 1}
    fixed = {
        **HunyuanDense.fixed,
        **{"norm_topk_prob": True, "routed_scaling_factor": 1, "group_limited_greedy": False, "moe_layer_num_skipped": 0},
        **{"use_qk_norm": True, "use_mixed_mlp_moe": True, "use_cla": False, "use_mla": False, "num_shared_expert": 1},
    }

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        listed = {name: config[name] for name in _LISTED if isinstance(config.get(name), list) and config[name]}
        alike = {name: numbers[0] for name, numbers in listed.items() if numbers == numbers[:1] * len(numbers)}
        return {**config, **alike}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        width = config.count("intermediate_size")
        config.need("moe_intermediate_size", config.get("moe_intermediate_size", width), width)


FAMILY = GgufFamily((HunyuanDense(), HunyuanMoe()))
