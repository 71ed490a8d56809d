"""Cohere's Command R, R+, R7B and A, and its mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import Unsupported
from weightsmith._models.formats.gguf.base.architecture import (
    LAYER_NORM,
    TIED,
    Contents,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
    Windows,
    need_window,
)
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    ROUTER,
    SHARED_EXPERTS,
    Predicting,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues


class Cohere(GgufArchitecture):
    """Command R and R+; heads are normalised in models of 64 layers and more."""

    name = "command-r"
    class_name = "CohereForCausalLM"
    model_types = ("cohere",)
    square = True
    layer = {**ATTENTION, **HEAD_NORMS, **MLP}
    numbers = (GgufKey("logit_scale", "logit_scale", "f32"),)
    fixed = {**TIED, "attention_bias": False}
    eps = LAYER_NORM

    def put_sizes(self, config: GgufConfig, keys: GgufKeys) -> None:
        """`max_position_embeddings` of Command R is 8,192; it was trained with the context of its tokenizer."""
        super().put_sizes(config, keys)
        if config.get("model_max_length") is not None:
            keys.u32("context_length", config.count("model_max_length"))

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        config.need("use_qk_norm", bool(config.get("use_qk_norm")), config.count("num_hidden_layers") >= 64)


class Cohere2(GgufArchitecture):
    """Command R7B and A, three of four layers of which have a window."""

    name = "cohere2"
    class_name = "Cohere2ForCausalLM"
    model_types = ("cohere2",)
    square = True
    factored = True
    layer = {**ATTENTION, **MLP}
    numbers = Cohere.numbers
    fixed = Cohere.fixed
    eps = LAYER_NORM
    windows = Windows(4)


_SELECTIONS = {"softmax": 1, "sigmoid": 2}
"""llama.cpp's numbers of what makes weights of the scores of experts."""
_GATING, _NORMALISED, _RMS = "expert_gating_func", "expert_weights_norm", "attention.layer_norm_rms_epsilon"
_PREFIX, _DENSE = "prefix_dense_intermediate_size", "first_k_dense_replace"
_EVERY_DENSE = "prefix_dense_sliding_window_pattern"


class Cohere2Moe(GgufArchitecture):
    """Cohere's mixtures of experts; layers without a window have RoPE only where they are dense."""

    name = "cohere2moe"
    class_name = "Cohere2MoeForCausalLM"
    model_types = ("cohere2_moe",)
    layer = {**ATTENTION, **MLP, **ROUTER, **EXPERTS, **SHARED_EXPERTS}
    sizes = {**Cohere.sizes, "feed_forward_length": _PREFIX}
    experts = "num_experts"
    numbers = (
        *Cohere.numbers,
        GgufKey("expert_feed_forward_length", "intermediate_size"),
        GgufKey("leading_dense_block_count", _DENSE, default=0, least=0),
        GgufKey("expert_shared_count", "num_shared_experts", default=0, least=0),
        GgufKey("expert_shared_feed_forward_length", "intermediate_size", times="num_shared_experts"),
    )
    fixed = {"attention_bias": False, "rope_scaling": None}  # transformers reads only `rope_parameters`
    eps = LAYER_NORM
    windows = Windows(4, stated=True, first=True)
    predicting = Predicting("num_nextn_predict_layers")

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        added, layers, dense = dict[str, Any](), config.get("num_hidden_layers"), config.get(_DENSE, 0)
        if config.get("layer_types") is None and type(layers) is type(dense) is int:
            settings = GgufConfig(config)
            runs = ((_EVERY_DENSE, 1, dense), ("sliding_window_pattern", 4, layers - dense))
            slides = [(i + 1) % settings.count(name, every) != 0 for name, every, length in runs for i in range(length)]
            added["layer_types"] = ["sliding_attention" if here else "full_attention" for here in slides]
        if config.get(_PREFIX) is None and config.get("intermediate_size") is not None:
            added[_PREFIX] = config["intermediate_size"]
        return {**super().complete(config), **added}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        need_window(config)
        if config.count("num_shared_experts", 0, least=0):
            strategy = config.get("shared_expert_combination_strategy")
            config.need("shared_expert_combination_strategy", strategy, "average")
        if "full_attention" in (config.get("layer_types") or ())[: config.count(_DENSE, 0, least=0)]:
            config.need(_EVERY_DENSE, config.get(_EVERY_DENSE), 1)  # with another one, they have no RoPE

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        selection = config.get("expert_selection_fn")
        if selection not in _SELECTIONS:
            raise config.wrong("expert_selection_fn", selection, "not softmax or sigmoid")
        keys.u32(_GATING, _SELECTIONS[selection])
        # transformers has the softmax of the chosen scores alone, which is the same as dividing by their sum
        keys.put(_NORMALISED, "bool", selection == "softmax" or bool(config.get("norm_topk_prob")))
        if config.get("rms_norm_eps") is not None:
            keys.f32(_RMS, config.number("rms_norm_eps"))

    def values(self, keys: Mapping[str, Any], where: str) -> GgufValues:
        """As the base class; a file with RMS norms may lack the epsilon of layer norms."""
        rms = keys.get(f"{self.name}.{_RMS}")
        return super().values(keys if rms is None else {f"{self.name}.{self.eps[0]}": rms, **keys}, where)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        number, normalised = values.count(_GATING, _SELECTIONS["sigmoid"]), values.truth(_NORMALISED, False)
        selection = {known: name for name, known in _SELECTIONS.items()}.get(number)
        if selection is None or (selection == "softmax" and not normalised):
            what = f"{self.name}.{_GATING} is {number} and {_NORMALISED} is {normalised}, which config.json cannot say"
            raise Unsupported(what, where=values.where, fix=USE_ORIGINAL)
        config["expert_selection_fn"], config["norm_topk_prob"] = selection, normalised
        config["rms_norm_eps"] = values.float32(_RMS) if _RMS in values else None
        if scaling := config.pop("rope_scaling"):
            config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), **scaling}


FAMILY = GgufFamily((Cohere(), Cohere2(), Cohere2Moe()))
