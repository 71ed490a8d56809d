"""Granite: with and without experts, those that all tokens share, layers of Mamba 2 (Granite 4), and layers with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from weightsmith._models.formats.gguf.base.architecture import (
    Contents,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
    Windows,
    all_or_none,
    need_window,
)
from weightsmith._models.formats.gguf.base.mamba import (
    INNER,
    KV_HEADS,
    MAMBA_SHAPES,
    layer_kinds,
    mamba_bare,
    mamba_flat,
    mamba_layer,
    need_attention,
    need_no_limit,
    put_kv_heads,
    take_inner,
    take_kv_heads,
)
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    LAYER_SHAPES,
    MLP,
    MLP_NORM,
    PROJECTIONS,
    WIDTH,
    SplitPart,
    SplitTensor,
    product_of,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

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


_ATTENDS, _MAMBA = ("attention", "full_attention"), ("mamba", "linear_attention")
"""Kinds of layers, as published and as newer versions of transformers write them."""
_SHARED = "shared_intermediate_size"
_ROPE = "rope.scaling.finetuned"
"""What `time_step_limit` is where there is none: as JSON of Python has it, and as transformers writes it."""
_SHARED_MLP = SplitTensor("shared_mlp.input_linear.weight", (SplitPart("ffn_gate.weight"), SplitPart("ffn_up.weight")))


def _inner(config: GgufConfig) -> int:
    return config.count("mamba_expand") * config.count("hidden_size")


def _kinds(config: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a Granite 4 has layers of Mamba, and experts."""
    types = config.get("layer_types")
    return not (isinstance(types, list) and all(kind in _ATTENDS for kind in types)), config.get("num_local_experts", 8) != 0


class GraniteHybrid(GgufArchitecture):
    """Granite 4 with layers of Mamba 2."""

    name = "granitehybrid"
    class_name = "GraniteMoeHybridForCausalLM"
    model_types = ("granitemoehybrid",)
    layer = {**ATTENTION, **MLP_NORM, **mamba_layer("mamba"), "ffn_down": "shared_mlp.output_linear"}
    bare = mamba_bare("mamba")
    splits: ClassVar[tuple[SplitTensor, ...]] = (_SHARED_MLP,)
    shapes = {**LAYER_SHAPES, **MAMBA_SHAPES}
    setting_names: ClassVar[Mapping[str, str]] = {
        KV_HEADS: "num_key_value_heads (0 in layers of Mamba, which layer_types states)",
        INNER: "mamba_expand * hidden_size",
        "feed_forward_length": _SHARED,
    }
    rotated = True
    numbers: ClassVar[tuple[GgufKey, ...]] = (
        *_NUMBERS,
        GgufKey("ssm.conv_kernel", "mamba_d_conv"),
        GgufKey("ssm.state_size", "mamba_d_state"),
        GgufKey("ssm.group_count", "mamba_n_groups"),
        GgufKey("ssm.time_step_rank", "mamba_n_heads"),
    )
    fixed = {"attention_bias": False, "mamba_conv_bias": True, "mamba_proj_bias": False}
    flat = mamba_flat(_inner, "mamba_n_groups")

    def owns(self, values: GgufValues) -> bool:
        return ("expert_count" in values) == bool(self.experts)

    def fits(self, config: Mapping[str, Any]) -> bool:
        return _kinds(config) == (True, bool(self.experts))

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        need_no_limit(config)

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        attends = layer_kinds(config, _ATTENDS, _MAMBA)
        heads = config.count("num_key_value_heads", config.count("num_attention_heads"))
        put_kv_heads(attends, heads, keys)
        keys.u32(INNER, _inner(config))
        width, count = config.get("mamba_d_head"), config.count("mamba_n_heads")
        if width not in (None, "auto"):
            config.need("mamba_n_heads * mamba_d_head", config.count("mamba_d_head") * count, _inner(config))
        if not self.experts:  # their width has no effect then
            keys.u32("feed_forward_length", config.count(_SHARED))
        keys.u32(_SHARED_WIDTH, config.count(_SHARED))
        keys.put(_ROPE, "bool", config.get("position_embedding_type") == "rope")

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        need_attention(config, layer_kinds(config, _ATTENDS, _MAMBA))

    def take_size(self, values: GgufValues, config: dict[str, Any], name: str, setting: str) -> None:
        if name != KV_HEADS:  # one for each layer
            super().take_size(values, config, name, setting)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        heads, attends = take_kv_heads(values, config["num_hidden_layers"])
        config["num_key_value_heads"] = heads
        config["layer_types"] = ["full_attention" if here else "linear_attention" for here in attends]
        config["mamba_expand"] = take_inner(values, config["hidden_size"], config["mamba_n_heads"])
        config["mamba_d_head"] = config["mamba_expand"] * config["hidden_size"] // config["mamba_n_heads"]
        config["position_embedding_type"] = "rope" if values.truth(_ROPE, True) else "nope"
        config[_SHARED] = values.count(_SHARED_WIDTH, config["intermediate_size"])
        if not self.experts:
            config["num_local_experts"] = config["num_experts_per_tok"] = 0


class GraniteHybridMoe(GraniteHybrid):
    """Granite 4 with layers of Mamba 2 and experts."""

    layer = {**GraniteMoe.layer, **mamba_layer("mamba")}
    splits = GraniteMoe.splits
    setting_names = {name: setting for name, setting in GraniteHybrid.setting_names.items() if setting != _SHARED}
    experts = "num_local_experts"


class GraniteFour(Granite):
    """Granite 4 of layers with attention alone and no experts, which is a Granite 3 under other names: it is read as that."""

    model_types = ("granitemoehybrid",)
    readable = False
    layer = {**ATTENTION, **MLP_NORM, "ffn_down": "shared_mlp.output_linear"}
    splits = (_SHARED_MLP,)
    sizes = {**Granite.sizes, "feed_forward_length": _SHARED}

    def fits(self, config: Mapping[str, Any]) -> bool:
        return _kinds(config) == (False, False)

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        config.need("position_embedding_type", config.get("position_embedding_type"), "rope")


_TURNED, _THETAS = "attention.rope_pattern", "layer_rope_theta"


def _bases(config: GgufConfig) -> list[float]:
    """The base of RoPE of each layer; 0: it has no RoPE. Raises FormatError, and Unsupported for several bases."""
    layers = config.count("num_hidden_layers")
    stated = config.get(_THETAS)
    if stated is None:
        return [config.number("rope_theta", within=config.rope()[0])] * layers
    if not isinstance(stated, list) or len(stated) != layers or not all(type(base) in (int, float) for base in stated):
        raise config.wrong(_THETAS, stated, f"not a number for each of {layers:,} layers")
    bases = [config.number(_THETAS, within={_THETAS: base}) if base else 0.0 for base in stated]
    first = next(filter(None, bases), 0.0)
    config.need(_THETAS, bases, [first if base else 0.0 for base in bases])
    return bases


class GraniteSwa(GgufArchitecture):
    """Granite with sinks of attention, and layers with a window or without RoPE."""

    name = "granite_swa"
    class_name = "GraniteSWAForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("granite_swa",)
    bare: ClassVar[Mapping[str, str]] = {"attn_sinks.weight": "self_attn.sinks"}
    rotated = True
    numbers: ClassVar[tuple[GgufKey, ...]] = _NUMBERS
    windows = Windows(4, stated=True, first=True)

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        need_window(config)

    def rope(self, config: GgufConfig) -> dict[str, Any]:
        rope = super().rope(config)
        return {**rope, "rope_theta": next(filter(None, _bases(config)), rope["rope_theta"])}

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        turned = [base != 0 for base in _bases(config)]
        older = config.get("no_rope_layers", turned)  # of versions before transformers', which ignores it
        config.need("no_rope_layers", older, turned)
        keys.put(_TURNED, "bool", turned)

    def take_tensors(self, config: dict[str, Any], contents: Contents, where: str) -> None:
        config["attention_bias"] = all_or_none(contents.shapes, [*PROJECTIONS], where)
        if not self.experts:
            config["mlp_bias"] = all_or_none(contents.shapes, [*MLP], where)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        turned, layers = values.get(_TURNED), config["num_hidden_layers"]
        turned = np.ones(layers, bool) if turned is None else turned  # as llama.cpp takes it
        if not isinstance(turned, np.ndarray) or turned.shape != (layers,):
            raise values.wrong(_TURNED, turned, f"not a truth value for each of {layers:,} layers")
        config[_THETAS] = [config["rope_theta"] if here else 0.0 for here in turned]


class GraniteMoeSwa(GraniteSwa):
    """The same with experts."""

    class_name = "GraniteMoeSWAForCausalLM"
    model_types = ("granitemoe_swa",)
    layer = {
        **{**ATTENTION, **MLP_NORM, "ffn_gate_inp": "block_sparse_moe.router"},
        **{"ffn_up_shexp": "shared_mlp.input_linear", "ffn_down_shexp": "shared_mlp.output_linear"},
    }
    bare = {
        **GraniteSwa.bare,
        "ffn_gate_up_exps.weight": "block_sparse_moe.experts.gate_up_proj",
        "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
    }
    shapes = {**LAYER_SHAPES, "ffn_up_shexp": (product_of(2, _SHARED_WIDTH), WIDTH)}
    experts = "num_local_experts"
    numbers = (*_NUMBERS, GgufKey(_SHARED_WIDTH, _SHARED, default=0, least=0))


FAMILY = GgufFamily(
    (
        *(Granite(), GraniteFour(), GraniteMoeShared(), GraniteMoe(), GraniteHybridMoe(), GraniteHybrid()),
        *(GraniteSwa(), GraniteMoeSwa()),
    )
)
