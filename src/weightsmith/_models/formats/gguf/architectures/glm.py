"""GLM 4, and GLM 4.5 to 4.7 with DeepSeek's experts."""

from __future__ import annotations

from typing import Any

from weightsmith._models.formats.gguf.architectures.deepseek import EXPERT_NUMBERS, PREDICTING
from weightsmith._models.formats.gguf.base.architecture import SIGMOID_ROUTER, Contents, GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    EXPERTS,
    GATE_IN_UP,
    HEAD_NORMS,
    LAYER_SHAPES,
    MLP,
    NORM_BETWEEN,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERTS,
)


class Glm4(GgufArchitecture):
    """GLM 4."""

    name = "glm4"
    class_name = "Glm4ForCausalLM"
    model_types = ("glm4",)
    layer = {
        **{**ATTENTION, "post_attention_norm": "post_self_attn_layernorm", "ffn_norm": "post_attention_layernorm"},
        **{"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_mlp_layernorm"},
    }
    shapes = {**LAYER_SHAPES, **GATE_IN_UP}
    partial = 0.5


class Glm4Moe(GgufArchitecture):
    """GLM 4.5, 4.6 and 4.7; biases and norms of heads are there or not."""

    name = "glm4moe"
    class_name = "Glm4MoeForCausalLM"
    model_types = ("glm4_moe",)
    layer = {**ATTENTION, **HEAD_NORMS, **MLP, **ROUTER, **SHARED_EXPERTS, **NORM_BETWEEN, **EXPERTS}
    bare = ROUTER_BIAS
    experts = "n_routed_experts"
    numbers = EXPERT_NUMBERS
    constants = SIGMOID_ROUTER
    predicting = PREDICTING
    partial = 0.5

    def take_tensors(self, config: dict[str, Any], contents: Contents, where: str) -> None:
        for setting, name in {"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"}.items():
            config[setting] = any(stored.endswith(f".{name}") for stored in contents.shapes)


FAMILY = GgufFamily((Glm4(), Glm4Moe()))
