"""EXAONE 4, and K-EXAONE, which has DeepSeek's experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from weightsmith._models.formats.gguf.architectures.deepseek import EXPERT_NUMBERS
from weightsmith._models.formats.gguf.base.architecture import (
    SIGMOID_ROUTER,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
    Windows,
    need_window,
)
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    MLP_NORM,
    NORMS_AFTER,
    PROJECTIONS,
    ROUTER,
    SHARED_EXPERTS,
    STACK_NAMES,
    Predicting,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig


class Exaone4(GgufArchitecture):
    """EXAONE 4; only the larger of the two sizes, with 64 layers, has a window."""

    name = "exaone4"
    class_name = "Exaone4ForCausalLM"
    model_types = ("exaone4",)
    square = True
    layer = {**PROJECTIONS, **HEAD_NORMS, **MLP, **NORMS_AFTER}
    windows = Windows(4, stated=True)
    scaled = True

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        window, large = config.get("sliding_window"), config.count("num_hidden_layers") == 64
        config.need("sliding_window", window, (4096 if window is None else window) if large else None)


class ExaoneMoe(GgufArchitecture):
    """K-EXAONE."""

    name = "exaone-moe"
    class_name = "ExaoneMoeForCausalLM"
    model_types = ("exaone_moe",)
    layer = {**ATTENTION, **HEAD_NORMS, **MLP, **MLP_NORM, **ROUTER, **SHARED_EXPERTS, **EXPERTS}
    bare = {"exp_probs_b.bias": "mlp.e_score_correction_bias"}
    experts = "num_experts"
    numbers = (
        *(key for key in EXPERT_NUMBERS if key.setting != "n_shared_experts"),
        GgufKey("expert_shared_count", "num_shared_experts"),
        GgufKey("expert_shared_feed_forward_length", "moe_intermediate_size", times="num_shared_experts"),
    )
    constants = SIGMOID_ROUTER
    windows = Windows(4, stated=True, default=128)
    scaled = True
    predicting = Predicting("num_nextn_predict_layers", stack="mtp.", renamed=STACK_NAMES)

    def of_model(self, config: Mapping[str, Any], names: Iterable[str]) -> Self:
        """As in `GgufArchitecture`; llama.cpp loads only layers that predict without experts."""
        names = list(names)
        bound = super().of_model(config, names)
        behind = bound.layers_of(names)[bound.trunk] if bound.predictors else set[str]()
        return self if "ffn_gate_inp.weight" in behind else bound

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        need_window(config)  # without one, transformers has RoPE in all layers, and llama.cpp in none


FAMILY = GgufFamily((Exaone4(), ExaoneMoe()))
