"""Hunyuan's dense models."""

from __future__ import annotations

from typing import Any

from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture, GgufFamily, head_dim
from weightsmith._models.formats.gguf.base.tensors import LLAMA_LAYER
from weightsmith._models.formats.gguf.base.values import GgufConfig


class HunyuanDense(GgufArchitecture):
    """Hunyuan without experts, whose RoPE has another base instead of scaled frequencies."""

    name = "hunyuan-dense"
    class_name = "HunYuanDenseV1ForCausalLM"
    model_types = ("hunyuan_v1_dense",)
    layer = LLAMA_LAYER | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    fixed = {"attention_bias": False, "mlp_bias": False}

    def rope(self, config: GgufConfig) -> dict[str, Any]:
        rope = super().rope(config)
        if rope["rope_type"] != "dynamic" or rope.get("alpha") is None:
            return rope
        alpha, width = config.number("alpha", None, rope), head_dim(config)
        base = config.number("rope_theta", within=rope) * (alpha ** (width / (width - 2)) if width > 2 else 1.0)
        if base >= 3e38:
            raise config.wrong("alpha", alpha, f"with which float32 cannot hold the base of RoPE, {base:g}")
        return {**rope, "rope_type": "default", "rope_theta": base}


FAMILY = GgufFamily((HunyuanDense(),))
