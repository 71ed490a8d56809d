"""Kimi Linear, whose layers have linear attention (Kimi Delta Attention) or a common latent vector of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from weightsmith._base.errors import FormatError
from weightsmith._models.formats.gguf.architectures.deepseek import LATENT, LATENT_PARTS, LATENT_SHAPES
from weightsmith._models.formats.gguf.base.architecture import SIGMOID_ROUTER, Contents, GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.mamba import KV_HEADS, need_attention, put_kv_heads, take_kv_heads
from weightsmith._models.formats.gguf.base.tensors import (
    LAYER_SHAPES,
    MIXTRAL_EXPERTS,
    MLP,
    MLP_NORM,
    PROJECTIONS,
    WIDTH,
    SplitTensor,
    TensorShape,
    product_of,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_DENSE = "leading_dense_block_count"
_HEAD, _HEADS = "kda.head_dim", "attention.head_count"
_INNER = product_of(_HEADS, _HEAD)
_LATENT_RANK, _TURNED = "attention.kv_lora_rank", "rope.dimension_count"
_SHAPES: Mapping[str, TensorShape] = {
    **{name: shape for name, shape in LAYER_SHAPES.items() if name not in PROJECTIONS},  # layers differ in those of q and o
    **{name: shape for name, shape in LATENT_SHAPES.items() if name not in PROJECTIONS},
    **dict.fromkeys(("attn_k", "attn_v"), (_INNER, WIDTH)),
    **dict.fromkeys(("ssm_f_a", "ssm_g_a"), (product_of(_HEAD), WIDTH)),
    **dict.fromkeys(("ssm_f_b", "ssm_g_b"), (_INNER, product_of(_HEAD))),
    "ssm_beta": (product_of(_HEADS), WIDTH),
}
_PUBLISHED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Settings of `linear_attn_config`, and what transformers calls them."""
_FULL, _LINEAR = "full_attention", "linear_attention"


class KimiLinear(GgufArchitecture):
    """Kimi Linear. Nothing has RoPE."""

    name = "kimi-linear"
    class_name = "KimiLinearForCausalLM"
    model_types = ("kimi_linear",)
    layer: ClassVar[Mapping[str, str]] = {
        **{**LATENT, **PROJECTIONS, **MLP, **MLP_NORM, "attn_norm": "input_layernorm", **MIXTRAL_EXPERTS},
        **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
        **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
        **{"ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm", "ffn_gate_inp": "block_sparse_moe.gate"},
        **{f"{name}_shexp": module.replace("mlp.", "block_sparse_moe.shared_experts.") for name, module in MLP.items()},
    }
    bare: ClassVar[Mapping[str, str]] = {
        **{"ssm_a": "self_attn.A_log", "ssm_dt.bias": "self_attn.dt_bias"},
        "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    }
    splits: ClassVar[tuple[SplitTensor, ...]] = LATENT_PARTS
    deepened = frozenset(f"ssm_conv1d_{part}.weight" for part in "qkv")
    shapes = _SHAPES
    setting_names: ClassVar[Mapping[str, str]] = {
        **{_LATENT_RANK: "kv_lora_rank", _TURNED: "qk_rope_head_dim", "attention.value_length_mla": "v_head_dim"},
    }
    rotary = False
    experts = "num_experts"
    experts_used = "num_experts_per_token"
    numbers: ClassVar[tuple[GgufKey, ...]] = (
        GgufKey("expert_feed_forward_length", "moe_intermediate_size"),
        GgufKey("expert_shared_count", "num_shared_experts"),
        GgufKey("expert_weights_scale", "routed_scaling_factor", "f32", 1.0),
        GgufKey("expert_group_count", "num_expert_group", default=1),
        GgufKey("expert_group_used_count", "topk_group", default=1),
        GgufKey("ssm.conv_kernel", "linear_conv_kernel_dim"),
        GgufKey(_HEAD, "linear_head_dim"),
        GgufKey(_LATENT_RANK, "kv_lora_rank"),
        GgufKey(_TURNED, "qk_rope_head_dim"),
        GgufKey("attention.value_length_mla", "v_head_dim"),
    )
    constants = SIGMOID_ROUTER
    fixed: ClassVar[Mapping[str, Any]] = {
        **{"attention_bias": False, "q_lora_rank": None, "tie_word_embeddings": False, "moe_renormalize": True},
        **{"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "mla_use_nope": True},
    }

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Settings of linear attention, which published files have in an object of their own."""
        linear = config.get("linear_attn_config")
        if not isinstance(linear, dict):
            return config
        return {**config, **{name: linear[published] for published, name in _PUBLISHED.items() if published in linear}}

    # ---- keys from config.json

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        heads = config.count("num_attention_heads")
        config.need("linear_num_heads", config.count("linear_num_heads"), heads)
        config.need("num_key_value_heads", config.count("num_key_value_heads", heads), heads)

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        rank, turned = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
        keys.u32("vocab_size", config.count("vocab_size"))
        keys.u32("attention.key_length", rank + turned)
        keys.u32("attention.value_length", config.count("hidden_size") // config.count("num_attention_heads"))
        keys.u32("attention.key_length_mla", config.count("qk_nope_head_dim") + turned)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        put_kv_heads([kind == _FULL for kind in _kinds(config)], 1, keys)
        keys.u32(_DENSE, _dense(config))

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        dense = _dense(config)
        for i, kind in enumerate(_kinds(config)):
            for said, name, what in (
                (kind == _LINEAR, "ssm_a", f"layer_types, layer {i} has {kind}"),
                (i >= dense, "ffn_gate_inp.weight", f"mlp_layer_types, layer {i} is {'sparse' if i >= dense else 'dense'}"),
            ):
                if said != (f"blk.{i}.{name}" in shapes):
                    raise FormatError(f"by {what}, unlike its tensors", where="config.json", fix="repair it")
        need_attention(config, [kind == _FULL for kind in _kinds(config)])

    # ---- config.json from the keys

    def take_size(self, values: GgufValues, config: dict[str, Any], name: str, setting: str) -> None:
        if name != KV_HEADS:  # one for each layer
            super().take_size(values, config, name, setting)

    def take_heads(self, values: GgufValues, config: dict[str, Any], default: int) -> int:
        return default

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        _, attends = take_kv_heads(values, layers)
        config["num_key_value_heads"] = config["linear_num_heads"] = heads
        config["layer_types"] = [_FULL if here else _LINEAR for here in attends]
        dense = min(values.count(_DENSE, 0, least=0), layers)
        config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
        turned = config["qk_rope_head_dim"]
        config["qk_nope_head_dim"] = values.count("attention.key_length_mla", least=turned + 1) - turned

    # ---- tensors

    def canonical(self, name: str) -> str:
        """transformers writes `block_sparse_moe` in layers without experts, too."""
        canonical = super().canonical(name)
        head, inside, rest = canonical.partition(".block_sparse_moe.")
        return f"{head}.mlp.{rest}" if inside and f"mlp.{rest}".removesuffix(".weight") in MLP.values() else canonical

    def hub_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """As in `GgufArchitecture`.

        >>> KimiLinear().hub_shape("blk.0.ssm_a", (4, 1)), KimiLinear().hub_shape("blk.0.ssm_conv1d_q.weight", (1, 8, 1, 4))
        ((1, 1, 4, 1), (8, 1, 4))
        """
        if name.endswith(".ssm_a"):
            return 1, 1, max(shape), 1
        return super().hub_shape(name, shape)


def _kinds(config: GgufConfig) -> list[str]:
    """What each layer attends by, as transformers takes it from config.json. Raises FormatError."""
    layers, kinds, linear = config.count("num_hidden_layers"), config.get("layer_types"), config.get("linear_attn_config")
    full, others = (linear.get(name) if isinstance(linear, dict) else None for name in ("full_attn_layers", "kda_layers"))
    if kinds is None and isinstance(full, list) and isinstance(others, list):
        kinds = [_FULL if i in full else _LINEAR if i in others else None for i in range(1, layers + 1)]
    if kinds is None:
        kinds = [_LINEAR if i % 4 or not i else _FULL for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (_FULL, _LINEAR) for kind in kinds):
        raise config.wrong("layer_types", kinds, f"not {_FULL} or {_LINEAR} for each of {layers:,} layers")
    return kinds


def _dense(config: GgufConfig) -> int:
    """How many layers at the start have no experts. Raises FormatError."""
    layers, kinds = config.count("num_hidden_layers"), config.get("mlp_layer_types")
    if kinds is None:
        return min(layers, config.count("first_k_dense_replace", 1, least=0))
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise config.wrong("mlp_layer_types", kinds, f"not dense at the start of {layers:,} layers, and sparse behind")
    return dense


FAMILY = GgufFamily((KimiLinear(),))
