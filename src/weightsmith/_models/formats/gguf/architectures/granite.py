"""Granite, with and without experts, and with experts that all tokens share."""

from __future__ import annotations

from typing import ClassVar

from weightsmith._models.formats.gguf.base.architecture import GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, MLP_NORM, SplitPart, SplitTensor
from weightsmith._models.formats.gguf.base.values import GgufValues

_NUMBERS = (
    GgufKey("attention.scale", "attention_multiplier", "f32"),
    GgufKey("embedding_scale", "embedding_multiplier", "f32", 1.0),
    GgufKey("residual_scale", "residual_multiplier", "f32", 1.0),
    GgufKey("logit_scale", "logits_scaling", "f32"),
)
_SHARED_WIDTH = "expert_shared_feed_forward_length"


class Granite(GgufArchitecture):
    """Granite 3 and 4 without experts."""

    name = "granite"
    class_name = "GraniteForCausalLM"
    model_types = ("granite",)
    rotated = True
    numbers = _NUMBERS


class GraniteMoe(GgufArchitecture):
    """Granite with experts, whose gates and other rows are one tensor."""

    name = "granitemoe"
    class_name = "GraniteMoeForCausalLM"
    model_types = ("granitemoe",)
    layer = {
        **{**ATTENTION, **MLP_NORM, "ffn_gate_inp": "block_sparse_moe.router.layer"},
        **{"ffn_down_exps": "block_sparse_moe.output_linear", "ffn_down_shexp": "shared_mlp.output_linear"},
    }
    splits = (
        SplitTensor(
            "block_sparse_moe.input_linear.weight", (SplitPart("ffn_gate_exps.weight"), SplitPart("ffn_up_exps.weight"))
        ),
        SplitTensor("shared_mlp.input_linear.weight", (SplitPart("ffn_gate_shexp.weight"), SplitPart("ffn_up_shexp.weight"))),
    )
    rotated = True
    experts = "num_local_experts"
    numbers: ClassVar[tuple[GgufKey, ...]] = _NUMBERS


class GraniteMoeShared(GraniteMoe):
    """Granite with a shared expert, too."""

    class_name = "GraniteMoeSharedForCausalLM"
    model_types = ("granitemoeshared",)
    numbers = (*_NUMBERS, GgufKey(_SHARED_WIDTH, "shared_intermediate_size"))

    def owns(self, values: GgufValues) -> bool:
        return super().owns(values) and _SHARED_WIDTH in values


FAMILY = GgufFamily((Granite(), GraniteMoeShared(), GraniteMoe()))
