"""Ernie 4.5, with and without experts."""

from __future__ import annotations

from typing import Any

from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, EXPERTS, MLP, MLP_NORM, ROUTER, SHARED_EXPERTS
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufValues


class Ernie(GgufArchitecture):
    """Ernie 4.5."""

    name = "ernie4_5"
    class_name = "Ernie4_5ForCausalLM"
    model_types = ("ernie4_5",)
    fixed = {"use_bias": False}


class ErnieMoe(GgufArchitecture):
    """Ernie 4.5 with experts, behind the first layers."""

    name = "ernie4_5-moe"
    class_name = "Ernie4_5_MoeForCausalLM"
    model_types = ("ernie4_5_moe",)
    layer = {**ATTENTION, **MLP, **MLP_NORM, **ROUTER, **SHARED_EXPERTS, **EXPERTS}
    bare = {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
    experts = "moe_num_experts"
    experts_used = "moe_k"
    numbers = (
        GgufKey("expert_feed_forward_length", "moe_intermediate_size"),
        GgufKey("expert_shared_count", "moe_num_shared_experts", default=0, least=0),
        GgufKey("expert_shared_feed_forward_length", "moe_intermediate_size", times="moe_num_shared_experts"),
        GgufKey("leading_dense_block_count", "moe_layer_start_index", default=0, least=0),
    )
    constants = {"interleave_moe_layer_step": 1}
    fixed = {"use_bias": False, "moe_layer_interval": 1}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        last = config.count("num_hidden_layers") - 1
        stated = config.get("moe_layer_end_index", -1)
        config.need("moe_layer_end_index", last if stated == -1 else stated, last)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        if "expert_shared_count" not in values:  # which llama.cpp does not read: it takes their common width
            width = values.count("expert_shared_feed_forward_length", 0, least=0)
            config["moe_num_shared_experts"] = width // config["moe_intermediate_size"]

    def hub_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name.endswith(".exp_probs_b.bias"):
            return (1, *([n for n in shape if n != 1] or [1]))
        return super().hub_shape(name, shape)


FAMILY = GgufFamily((Ernie(), ErnieMoe()))
