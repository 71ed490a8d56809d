"""Jamba, whose layers are Mamba or attention, and some of whose MLPs are experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.mamba import (
    INNER,
    KV_HEADS,
    MAMBA_1_SHAPES,
    RANK,
    STATE,
    mamba_1_layer,
    need_attention,
    put_kv_heads,
    put_rank,
    take_kv_heads,
)
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL
from weightsmith._models.formats.gguf.base.tensors import LAYER_SHAPES, PROJECTIONS
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_ROLES = ("gate", "up", "down")


class Jamba(GgufArchitecture):
    """Jamba. Attention has no RoPE."""

    name = "jamba"
    class_name = "JambaForCausalLM"
    model_types = ("jamba",)
    square = True
    layer: ClassVar[Mapping[str, str]] = {
        **{**PROJECTIONS, "attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"},
        **{f"ffn_{role}": f"feed_forward.{role}_proj" for role in _ROLES},
        **{f"ffn_{role}_exps": f"feed_forward.experts.{{}}.{role}_proj" for role in _ROLES},
        **{"ffn_gate_inp": "feed_forward.router", **mamba_1_layer("mamba")},
        **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
    }
    bare: ClassVar[Mapping[str, str]] = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D"}
    ends = {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
    shapes = {**LAYER_SHAPES, **MAMBA_1_SHAPES}
    setting_names: ClassVar[Mapping[str, str]] = {
        KV_HEADS: "num_key_value_heads (0 in layers of Mamba, which attn_layer_period states)",
        **{INNER: "mamba_expand * hidden_size", RANK: "mamba_dt_rank"},
    }
    rotary = False
    experts = "num_experts"
    numbers: ClassVar[tuple[GgufKey, ...]] = (
        GgufKey("ssm.conv_kernel", "mamba_d_conv"),
        GgufKey(STATE, "mamba_d_state"),
    )
    fixed: ClassVar[Mapping[str, Any]] = {"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False}

    # ---- keys from config.json

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        layers, heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
        attends = _periodic(config, "attn", layers)
        put_kv_heads(attends, config.count("num_key_value_heads", heads), keys)
        keys.u32(INNER, 2 * config.count("hidden_size"))
        put_rank(config, "mamba_dt_rank", keys)
        if (experts := config.count("num_experts")) == 1:  # all layers have an MLP then: llama.cpp loads no more than there are
            keys.u32("expert_used_count", experts)

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        several = config.count("num_experts") > 1
        for i, stated in enumerate(_periodic(config, "expert", config.count("num_hidden_layers"))):
            if (several and stated) != (f"blk.{i}.ffn_gate_inp.weight" in shapes):
                what = f"by expert_layer_period, layer {i} has {'' if several and stated else 'no '}experts, unlike its tensors"
                raise FormatError(what, where="config.json", fix="repair it")
        need_attention(config, _periodic(config, "attn", config.count("num_hidden_layers")))

    # ---- config.json from the keys

    def take_size(self, values: GgufValues, config: dict[str, Any], name: str, setting: str) -> None:
        if name != KV_HEADS:  # one for each layer
            super().take_size(values, config, name, setting)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        layers = config["num_hidden_layers"]
        config["num_key_value_heads"], attends = take_kv_heads(values, layers)
        config |= _period_of(attends, "attn", values.where)
        experts = [f"blk.{i}.ffn_gate_inp.weight" in contents.shapes for i in range(layers)]
        config |= _period_of(experts, "expert", values.where)
        config["mamba_dt_rank"] = values.count(RANK)
        if values.count(INNER) != 2 * config["hidden_size"]:
            raise values.wrong(INNER, values.count(INNER), f"not twice {config['hidden_size']:,}, the width of the model")


def _periodic(config: GgufConfig, kind: str, layers: int) -> list[bool]:
    """Which layers are of a kind: those of every so many that config.json states. Raises FormatError."""
    name, at = f"{kind}_layer_period", f"{kind}_layer_offset"
    period, offset = config.count(name), config.count(at, least=0)
    if offset >= period:
        raise config.wrong(at, offset, f"not below {name}, {period:,}")
    return [i % period == offset for i in range(layers)]


def _period_of(of_kind: Iterable[bool], kind: str, where: str) -> dict[str, int]:
    """What config.json says of the layers of a kind. Raises Unsupported for layers that are not one of every so many."""
    present = [*of_kind]
    layers, places = len(present), [i for i, here in enumerate(present) if here]
    offset = places[0] if places else layers
    period = places[1] - offset if len(places) > 1 else max(layers, offset + 1)
    if offset >= period or [i for i in range(layers) if i % period == offset] != places:
        what = f"{kind}_layer_period cannot say that layers {', '.join(map(str, places[:8]))} are those of its kind"
        raise Unsupported(what, where=where, fix=USE_ORIGINAL)
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}


FAMILY = GgufFamily((Jamba(),))
