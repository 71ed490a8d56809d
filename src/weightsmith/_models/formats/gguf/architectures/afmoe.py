"""Trinity (AFMoE): gated attention, norms around both halves of a layer, and experts whose scores are always normalised."""

from __future__ import annotations

from typing import Any

from weightsmith._models.formats.gguf.base.architecture import (
    NORMALISED,
    SIGMOID_ROUTER,
    UNTIED,
    Contents,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
    Windows,
    need_normalised,
)
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    LAYER_SHAPES,
    MLP,
    NORM_BETWEEN,
    SHARED_EXPERTS,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues


class Afmoe(GgufArchitecture):
    """Trinity; every fourth layer attends to everything, and has no RoPE."""

    name = "afmoe"
    class_name = "AfmoeForCausalLM"
    model_types = ("afmoe",)
    layer = {
        **{**ATTENTION, **HEAD_NORMS, **MLP, **SHARED_EXPERTS, **EXPERTS, **NORM_BETWEEN},
        **{"attn_gate": "self_attn.gate_proj", "ffn_gate_inp": "mlp.router.gate"},
        **{"ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    }
    bare = {"exp_probs_b.bias": "mlp.expert_bias"}
    shapes = {**LAYER_SHAPES, "attn_gate": LAYER_SHAPES["attn_q"]}
    experts = "num_experts"
    numbers = (
        GgufKey("expert_feed_forward_length", "moe_intermediate_size"),
        GgufKey("expert_shared_count", "num_shared_experts", least=0),
        GgufKey("leading_dense_block_count", "num_dense_layers", default=0, least=0),
        GgufKey("expert_weights_scale", "route_scale", "f32", 1.0),
    )
    constants = SIGMOID_ROUTER
    fixed = {**UNTIED, "mup_enabled": True, "attention_bias": False, "route_norm": True, "score_func": "sigmoid"} | {
        name: 1 for name in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")
    }
    windows = Windows(4)

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        if config.get("layer_types") is None:
            config.need("global_attn_every_n_layers", config.get("global_attn_every_n_layers"), 4)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.put(NORMALISED, "bool", True)  # llama.cpp takes false where a file does not say it

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        need_normalised(values)


FAMILY = GgufFamily((Afmoe(),))
