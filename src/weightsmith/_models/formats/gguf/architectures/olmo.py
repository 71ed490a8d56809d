"""OLMo, whose norms have no weights, OLMo 2 and 3, whose norms are behind attention and MLP, and OLMoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import Unsupported
from weightsmith._models.formats.gguf.base.architecture import (
    UNTIED,
    Contents,
    GgufArchitecture,
    GgufFamily,
    Windows,
    as_many_kv_heads,
)
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL
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
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_EPS = 1e-5
"""What the norms of OLMo add, in transformers' code."""
_CLAMP = "attention.clamp_kqv"


class Olmo(GgufArchitecture):
    """OLMo."""

    name = "olmo"
    class_name = "OlmoForCausalLM"
    model_types = ("olmo",)
    square = True
    layer = {**PROJECTIONS, **MLP}
    ends = {"token_embd": "model.embed_tokens", "output": "lm_head"}
    rotated = True
    eps = ("attention.layer_norm_epsilon", "layer_norm_eps")
    fixed = {"attention_bias": False}

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The norms add the same in all models: config.json does not say it."""
        return {**config, "layer_norm_eps": _EPS}

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        if config.get("clip_qkv") is not None:
            keys.f32(_CLAMP, config.number("clip_qkv"))

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        if (eps := config.pop("layer_norm_eps")) != _EPS:
            what = f"{self.eps[0]} is {eps:g}, and transformers takes {_EPS:g} for granted"
            raise Unsupported(what, where=values.where, fix=USE_ORIGINAL)
        config["clip_qkv"] = values.float32(_CLAMP) if _CLAMP in values else None


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


FAMILY = GgufFamily((Olmo(), Olmo3(), Olmo2(), Olmoe()))
