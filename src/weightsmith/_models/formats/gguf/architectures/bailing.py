"""Ling 3: layers with Kimi's linear attention or DeepSeek's common latent vector, and DeepSeek's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.formats.gguf.architectures.deepseek import LATENT, LATENT_PARTS, LATENT_SHAPES
from weightsmith._models.formats.gguf.base.architecture import (
    SIGMOID_ROUTER,
    UNTIED,
    Contents,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
)
from weightsmith._models.formats.gguf.base.mamba import KV_HEADS, need_attention, need_states, put_kv_heads, take_kv_heads
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL
from weightsmith._models.formats.gguf.base.tensors import (
    EXPERTS,
    LAST_NORM,
    LAYER_SHAPES,
    MLP,
    MLP_NORM,
    PROJECTIONS,
    ROUTER,
    SHARED_EXPERTS,
    WIDTH,
    Predicting,
    SplitTensor,
    TensorShape,
    layer_number,
    product_of,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_HEAD, _HEADS, _BOUND = "kda.head_dim", "attention.head_count", "kda.gate_lower_bound"
_INNER = product_of(_HEADS, _HEAD)
_RANK, _QUERY_RANK, _TURNED = "attention.kv_lora_rank", "attention.q_lora_rank", "rope.dimension_count"
_SHARED = "expert_shared_feed_forward_length"
_SHAPES: Mapping[str, TensorShape] = {
    **{name: shape for name, shape in LAYER_SHAPES.items() if name not in PROJECTIONS},  # layers differ in those of q and o
    **{name: shape for name, shape in LATENT_SHAPES.items() if name not in PROJECTIONS},
    **dict.fromkeys(("attn_k", "attn_v", "ssm_f_a", "ssm_g_a"), (_INNER, WIDTH)),
    **dict.fromkeys(("attn_gate", "ssm_beta"), (product_of(_HEADS), WIDTH)),
}
_FULL, _LINEAR = "full_attention", "linear_attention"
_OUT, _DENSE_END, _OUT_END = "attention.o_proj", ".attention.dense.weight", ".attention.o_proj.weight"
"""What layers that attend call their last projection, and what those with linear attention call it."""
_LINEAR_NAMES = {"attn_gate": "ssm_g_a"}
"""llama.cpp's names in layers with linear attention, where they are other ones."""
_PREDICTING = {f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm")} | {LAST_NORM: "final_layernorm"}
"""Modules that only layers that predict have."""
_LIMITS = {"swiglu_clamp_exp": "expert_swiglu_limit_list", "swiglu_clamp_shexp": "share_expert_swiglu_limit_list"}
"""Keys with the largest gate of each layer, and their settings, which transformers ignores."""


class BailingHybrid(GgufArchitecture):
    """Ling 3; llama.cpp and published files have other names for two tensors of layers with linear attention."""

    name = "bailingmoe3"
    class_name = "BailingHybridForCausalLM"
    model_types = ("bailing_hybrid",)
    layer: ClassVar[Mapping[str, str]] = {
        **{name: module.replace("self_attn.", "attention.") for name, module in {**PROJECTIONS, **LATENT}.items()},
        **{"attn_norm": "input_layernorm", "attn_output": "attention.dense", "attn_gate": "attention.g_proj"},
        **{**MLP, **MLP_NORM, **ROUTER, **EXPERTS, **SHARED_EXPERTS},
        **{f"ssm_conv1d_{part}": f"attention.{part}_conv1d" for part in "qkv"},
        **{"ssm_f_a": "attention.f_proj", "ssm_beta": "attention.b_proj", "ssm_norm": "attention.o_norm"},
    }
    bare: ClassVar[Mapping[str, str]] = {
        **{"ssm_a": "attention.A_log", "ssm_dt.bias": "attention.dt_bias"},
        "exp_probs_b.bias": "mlp.gate.expert_bias",
    }
    ends = {**GgufArchitecture.ends, "token_embd": "model.word_embeddings"}
    splits: ClassVar[tuple[SplitTensor, ...]] = (replace(LATENT_PARTS[0], name="attention.kv_b_proj.weight"),)
    deepened = frozenset(f"ssm_conv1d_{part}.weight" for part in "qkv")
    flat = {"ssm_a": lambda config: 1}
    shapes = _SHAPES
    setting_names: ClassVar[Mapping[str, str]] = {
        **{_HEAD: "head_dim", _RANK: "kv_lora_rank", _QUERY_RANK: "q_lora_rank", _TURNED: "qk_rope_head_dim"},
        "attention.key_length_mla": "(qk_nope_head_dim + qk_rope_head_dim)",
    }
    experts = "num_experts"
    numbers: ClassVar[tuple[GgufKey, ...]] = (
        GgufKey("expert_feed_forward_length", "moe_intermediate_size"),
        GgufKey(_SHARED, "moe_intermediate_size", times="num_shared_experts"),
        GgufKey("expert_shared_count", "num_shared_experts"),
        GgufKey("leading_dense_block_count", "first_k_dense_replace", least=0),
        GgufKey("expert_weights_scale", "routed_scaling_factor", "f32", 1.0),
        GgufKey("expert_weights_norm", "norm_topk_prob", "bool", default=False),
        GgufKey("expert_group_count", "n_group", default=1),
        GgufKey("expert_group_used_count", "topk_group", default=1),
        GgufKey("ssm.conv_kernel", "short_conv_kernel_size"),
        GgufKey(_RANK, "kv_lora_rank"),
        GgufKey(_TURNED, "qk_rope_head_dim"),
        GgufKey("attention.value_length_mla", "v_head_dim"),
    )
    constants = SIGMOID_ROUTER
    fixed: ClassVar[Mapping[str, Any]] = {
        **{**UNTIED, "kda_safe_gate": True, "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise"},
        **{"score_function": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True, "attention_bias": False},
        **{"use_bias": False, "use_qkv_bias": False, "moe_router_enable_expert_bias": True, "use_mla_nope": False},
    }
    predicting = Predicting("num_nextn_predict_layers")

    # ---- which layers attend

    def of_config(self, config: Mapping[str, Any]) -> Self:
        return self.with_linear(kind == _LINEAR for kind in _listed_kinds(config))

    def of_keys(self, values: GgufValues) -> Self:
        heads = values.get(KV_HEADS)
        return self.with_linear(not here for here in (heads if isinstance(heads, np.ndarray) else ()))

    # ---- keys from config.json

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        heads = config.count("num_attention_heads")
        config.need("num_key_value_heads", config.count("num_key_value_heads", heads), heads)
        config.need("rope_type", self.rope(config)["rope_type"], "default")

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        rank, turned = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
        width = config.count("linear_head_dim", config.get("head_dim"))  # transformers 5 saves another number as `head_dim`
        keys.u32("vocab_size", config.count("vocab_size"))
        keys.u32(_HEAD, width)
        keys.put("kda.safe_gate", "bool", True)
        keys.f32(_BOUND, _below_zero(config, "kda_lower_bound"))
        if config.get("q_lora_rank") is not None:
            keys.u32(_QUERY_RANK, config.count("q_lora_rank"))
        keys.u32("attention.key_length", rank + turned)
        keys.u32("attention.value_length", width)
        keys.u32("attention.key_length_mla", config.count("qk_nope_head_dim") + turned)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        put_kv_heads([kind == _FULL for kind in _kinds(config)] + [True] * self.predictors, 1, keys)
        for key, setting in _LIMITS.items():
            if (limits := config.get(setting)) is not None:
                keys.put(key, "f32", self._limits(config, setting, limits))

    def _limits(self, config: GgufConfig, setting: str, limits: object) -> list[float]:
        """The largest gate of each layer; 0: there is none. Layers at the end may lack theirs, as in published files."""
        layers = config.count("num_hidden_layers") + self.predictors
        if not isinstance(limits, list):
            raise config.wrong(setting, limits, "not a list of numbers from 0 on")
        listed = [config.number(setting, within={setting: limit}) if limit else 0.0 for limit in limits[:layers]]
        return listed + [0.0] * (layers - len(listed))

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        kinds = _kinds(config)
        for number, kind in enumerate(kinds):
            if (kind == _LINEAR) != (f"blk.{number}.ssm_a" in shapes):
                what = f"by layer_types or layer_group_size, layer {number} has {kind}, unlike its tensors"
                raise FormatError(what, where="config.json", fix="repair it")
        need_attention(config, attends := [kind == _FULL for kind in kinds])
        need_states(config, attends)

    # ---- config.json from the keys

    def take_size(self, values: GgufValues, config: dict[str, Any], name: str, setting: str) -> None:
        if name != KV_HEADS:  # one for each layer
            super().take_size(values, config, name, setting)

    def take_heads(self, values: GgufValues, config: dict[str, Any], default: int) -> int:
        return default

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        if not values.truth("kda.safe_gate", True):
            raise Unsupported("kda.safe_gate is false", where=values.where, fix=USE_ORIGINAL)
        layers, turned = config["num_hidden_layers"], config["qk_rope_head_dim"]
        _, attends = take_kv_heads(values, layers + self.predictors)
        config["num_key_value_heads"] = config["num_attention_heads"]
        config["layer_types"] = [_FULL if here else _LINEAR for here in attends[:layers]]
        config["layer_group_size"] = attends.index(True) + 1
        config["head_dim"] = values.count(_HEAD)
        config["kda_lower_bound"] = float(str(np.float32(_below_zero(values, _BOUND))))
        config["q_lora_rank"] = values.count(_QUERY_RANK) if _QUERY_RANK in values else None
        config["qk_nope_head_dim"] = values.count("attention.key_length_mla", least=turned + 1) - turned
        width = config["moe_intermediate_size"]
        config["moe_shared_expert_intermediate_size"] = values.count(_SHARED, config["num_shared_experts"] * width)
        for key, setting in _LIMITS.items():
            if key in values:
                limits = values.numbers_by_layer(key, layers + self.predictors)
                config[setting] = [float(str(np.float32(limit))) for limit in limits]

    # ---- tensors

    def canonical(self, name: str) -> str:
        """transformers 5 calls the last projection `dense` in all layers."""
        canonical = super().canonical(name)
        return canonical.replace(_DENSE_END, _OUT_END) if layer_number(canonical) in self.linear else canonical

    def _modules(self, number: int) -> Mapping[str, str]:
        if number in self.linear:
            return {_LINEAR_NAMES.get(name, name): module for name, module in self.layer.items()} | {"attn_output": _OUT}
        return {**self.layer, **_PREDICTING} if self.predictors and number >= self.trunk else self.layer

    def power_of(self, name: str) -> int:
        return abs(super().power_of(name))


def _below_zero(values: GgufValues, name: str) -> float:
    """A number below 0. Raises FormatError."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -3e38 < value < 0:
        raise values.wrong(name, value, "not a number below 0")
    return float(value)


def _listed_kinds(config: Mapping[str, Any]) -> list[str]:
    """What each layer attends by: as `layer_types` lists it, or the last of every group and those behind all groups attend.

    Unchecked: [] if config.json does not say it.
    """
    kinds, layers, size = (config.get(name) for name in ("layer_types", "num_hidden_layers", "layer_group_size"))
    if kinds is not None or type(layers) is not int or type(size) is not int or not 0 < size <= layers:
        return kinds if isinstance(kinds, list) else []
    grouped = layers - layers % size
    return [_LINEAR if (number + 1) % size and number < grouped else _FULL for number in range(layers)]


def _kinds(config: GgufConfig) -> list[str]:
    """The same. Raises FormatError."""
    layers, size = config.count("num_hidden_layers"), config.get("layer_group_size")
    kinds = _listed_kinds({name: config.get(name) for name in ("layer_types", "num_hidden_layers", "layer_group_size")})
    if len(kinds) != layers or not all(kind in (_FULL, _LINEAR) for kind in kinds):
        if config.get("layer_types") is None:
            raise config.wrong("layer_group_size", size, f"not a whole number from 1 to {layers:,}")
        what = f"not {_FULL} or {_LINEAR} for each of {layers:,} layers"
        raise config.wrong("layer_types", config.get("layer_types"), what)
    return kinds


FAMILY = GgufFamily((BailingHybrid(),))
