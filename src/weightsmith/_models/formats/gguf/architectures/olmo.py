"""OLMo 2 and 3, whose norms are behind attention and MLP, and OLMoE."""

from __future__ import annotations

from weightsmith._models.formats.gguf.base.architecture import UNTIED, GgufArchitecture, GgufFamily, Windows, as_many_kv_heads
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    MLP_NORM,
    NORMS_AFTER,
    PROJECTIONS,
    ROUTER,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufValues


class Olmo2(GgufArchitecture):
    """OLMo 2."""

    name = "olmo2"
    class_name = "Olmo2ForCausalLM"
    model_types = ("olmo2",)
    square = True
    layer = {**PROJECTIONS, **HEAD_NORMS, **MLP, **NORMS_AFTER}
    fixed = UNTIED


class Olmo3(Olmo2):
    """OLMo 3, three of four layers of which have a window."""

    class_name = "Olmo3ForCausalLM"
    model_types = ("olmo3",)
    windows = Windows(4, stated=True)

    def owns(self, values: GgufValues) -> bool:
        return super().owns(values) and "attention.sliding_window" in values


class Olmoe(GgufArchitecture):
    """OLMoE."""

    name = "olmoe"
    class_name = "OlmoeForCausalLM"
    model_types = ("olmoe",)
    square = True
    layer = {**ATTENTION, **HEAD_NORMS, **MLP_NORM, **ROUTER, **EXPERTS}
    experts = "num_experts"
    fixed = {**UNTIED, "norm_topk_prob": False, "clip_qkv": None}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        as_many_kv_heads(config)


FAMILY = GgufFamily((Olmo3(), Olmo2(), Olmoe()))
