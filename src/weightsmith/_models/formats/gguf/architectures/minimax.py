"""MiniMax M2: Mixtral's layout, with norms of all heads together and a bias of the router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._models.formats.gguf.base.architecture import (
    SIGMOID_ROUTER,
    UNTIED,
    Contents,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
    head_dim,
)
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, HEAD_NORMS, MIXTRAL_EXPERTS, MLP_NORM
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufValues


class MiniMaxM2(GgufArchitecture):
    """MiniMax M2, all of whose MLPs are experts. Released models state in `rotary_dim` how much of a head RoPE turns."""

    name = "minimax-m2"
    class_name = "MiniMaxM2ForCausalLM"
    model_types = ("minimax_m2",)
    layer = {**ATTENTION, **HEAD_NORMS, **MLP_NORM, "ffn_gate_inp": "block_sparse_moe.gate", **MIXTRAL_EXPERTS}
    bare = {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
    experts = "num_local_experts"
    numbers = (GgufKey("expert_feed_forward_length", "intermediate_size"),)
    constants = SIGMOID_ROUTER
    fixed = {**UNTIED, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
    partial = 1.0

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        if config.get("rotary_dim") is None or config.get("partial_rotary_factor") is not None:
            return config
        settings = GgufConfig(config)
        return {**config, "partial_rotary_factor": settings.count("rotary_dim") / head_dim(settings)}

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        config["rotary_dim"] = values.count("rope.dimension_count", config["head_dim"])


FAMILY = GgufFamily((MiniMaxM2(),))
