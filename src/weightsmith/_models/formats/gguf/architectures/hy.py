"""Hy 3: Qwen3's attention, experts with a bias of the router, and one MLP of those that all tokens share."""

from __future__ import annotations

from typing import Any

from weightsmith._models.formats.gguf.base.architecture import (
    NORMALISED,
    SIGMOID_ROUTER,
    Contents,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
    need_normalised,
)
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, EXPERTS, HEAD_NORMS, MLP, MLP_NORM, Predicting
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_SHARED = "expert_shared_feed_forward_length"


class HyV3(GgufArchitecture):
    """Hy 3; llama.cpp finds the layers with experts by their tensors."""

    name = "hy_v3"
    class_name = "HYV3ForCausalLM"
    model_types = ("hy_v3",)
    layer = {
        **{**ATTENTION, **HEAD_NORMS, **MLP, **MLP_NORM, **EXPERTS, "ffn_gate_inp": "mlp.router.gate"},
        **{f"{name}_shexp": module.replace("mlp.", "mlp.shared_mlp.") for name, module in MLP.items()},
    }
    bare = {"exp_probs_b": "mlp.expert_bias"}
    experts = "num_experts"
    numbers = (
        GgufKey("expert_feed_forward_length", "moe_intermediate_size"),
        GgufKey(_SHARED, "moe_intermediate_size", times="num_shared_experts"),
        GgufKey("expert_weights_scale", "router_scaling_factor", "f32", 1.0),
    )
    constants = SIGMOID_ROUTER
    fixed = {"attention_bias": False, "mlp_bias": False, "route_norm": True, "qk_norm": True}
    predicting = Predicting("num_nextn_predict_layers", renamed={"shared_head.norm": "final_layernorm"})

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        config.count("num_shared_experts")

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.put(NORMALISED, "bool", True)  # llama.cpp takes false where a file does not say it

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        width = values.count(_SHARED, config["moe_intermediate_size"])
        config["num_shared_experts"] = width // config["moe_intermediate_size"]
        layers = range(config["num_hidden_layers"])
        sparse = [f"blk.{number}.ffn_gate_inp.weight" in contents.shapes for number in layers]
        config["mlp_layer_types"] = ["sparse" if has_experts else "dense" for has_experts in sparse]
        need_normalised(values)


FAMILY = GgufFamily((HyV3(),))
