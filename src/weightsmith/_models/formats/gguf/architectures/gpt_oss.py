"""gpt-oss, whose experts are stored as two tensors: their gates and their other rows take turns."""

from __future__ import annotations

from typing import Any

from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily, GgufKey, Windows
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, NORM_BETWEEN, SplitPart, SplitTensor
from weightsmith._models.formats.gguf.base.values import GgufValues


class GptOss(GgufArchitecture):
    """gpt-oss."""

    name = "gpt-oss"
    class_name = "GptOssForCausalLM"
    model_types = ("gpt_oss",)
    layer = {**ATTENTION, **NORM_BETWEEN, "ffn_gate_inp": "mlp.router"}
    bare = {"attn_sinks.weight": "self_attn.sinks", "ffn_down_exps.bias": "mlp.experts.down_proj_bias"}
    splits = (
        SplitTensor(
            "mlp.experts.gate_up_proj",
            (SplitPart("ffn_gate_exps.weight", transposed=True), SplitPart("ffn_up_exps.weight", transposed=True)),
            columns="alternate",
        ),
        SplitTensor("mlp.experts.down_proj", (SplitPart("ffn_down_exps.weight", transposed=True),)),
        SplitTensor(
            "mlp.experts.gate_up_proj_bias",
            (SplitPart("ffn_gate_exps.bias"), SplitPart("ffn_up_exps.bias")),
            columns="alternate",
            bands=True,
        ),
    )
    experts = "num_local_experts"
    numbers = (GgufKey("expert_feed_forward_length", "intermediate_size"),)
    fixed = {"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    windows = Windows(2)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        if scaling := config.get("rope_scaling"):
            scaling["truncate"] = False  # as published; the GGUF file does not say it


FAMILY = GgufFamily((GptOss(),))
