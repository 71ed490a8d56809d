"""dots.llm1: Llama with DeepSeek's experts."""

from __future__ import annotations

from weightsmith._models.formats.gguf.architectures.deepseek import EXPERT_NUMBERS
from weightsmith._models.formats.gguf.base.architecture import (
    SIGMOID_ROUTER,
    UNTIED,
    GgufArchitecture,
    GgufFamily,
    as_many_kv_heads,
)
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    MLP_NORM,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERTS,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig


class Dots1(GgufArchitecture):
    """dots.llm1."""

    name = "dots1"
    class_name = "Dots1ForCausalLM"
    model_types = ("dots1",)
    layer = {**ATTENTION, **HEAD_NORMS, **MLP, **MLP_NORM, **ROUTER, **SHARED_EXPERTS, **EXPERTS}
    bare = ROUTER_BIAS
    experts = "n_routed_experts"
    numbers = EXPERT_NUMBERS
    constants = SIGMOID_ROUTER
    fixed = {**UNTIED, "attention_bias": False}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        as_many_kv_heads(config)


FAMILY = GgufFamily((Dots1(),))
