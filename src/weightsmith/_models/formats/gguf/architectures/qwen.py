"""Qwen 2 and 3, with and without experts."""

from __future__ import annotations

from typing import ClassVar

from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, EXPERTS, HEAD_NORMS, MLP, MLP_NORM, ROUTER, SHARED_EXPERT
from weightsmith._models.formats.gguf.base.values import GgufConfig

EXPERT_WIDTH = GgufKey("expert_feed_forward_length", "moe_intermediate_size")
EXPERT_WIDTHS = (EXPERT_WIDTH, GgufKey("expert_shared_feed_forward_length", "shared_expert_intermediate_size"))
ALL_SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1}


class Qwen2(GgufArchitecture):
    """Qwen 2 and 2.5."""

    name = "qwen2"
    class_name = "Qwen2ForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    square = True

    def uses_window(self, config: GgufConfig) -> bool:
        return bool(config.get("use_sliding_window", False))


class Qwen2Moe(Qwen2):
    """Qwen 1.5 and 2 with experts."""

    name = "qwen2moe"
    class_name = "Qwen2MoeForCausalLM"
    model_types = ("qwen2_moe",)
    layer = {**ATTENTION, **MLP_NORM, **ROUTER, **SHARED_EXPERT, **EXPERTS}
    experts = "num_experts"
    numbers = EXPERT_WIDTHS
    fixed = {"norm_topk_prob": False, **ALL_SPARSE}


class Qwen3(GgufArchitecture):
    """Qwen 3."""

    name = "qwen3"
    class_name = "Qwen3ForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    factored = True
    layer = {**ATTENTION, **HEAD_NORMS, **MLP, **MLP_NORM}


class Qwen3Moe(GgufArchitecture):
    """Qwen 3 with experts."""

    name = "qwen3moe"
    class_name = "Qwen3MoeForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    factored = True
    layer = {**ATTENTION, **HEAD_NORMS, **MLP_NORM, **ROUTER, **EXPERTS}
    experts = "num_experts"
    numbers = (EXPERT_WIDTH,)
    fixed = {"norm_topk_prob": True, **ALL_SPARSE}


FAMILY = GgufFamily((Qwen2(), Qwen2Moe(), Qwen3(), Qwen3Moe()))
