"""Laguna: gated attention with a number of heads for each layer, and experts with a bias of the router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._models.formats.gguf.base.architecture import (
    NORMALISED,
    SIGMOID_ROUTER,
    Contents,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
    Windows,
    head_dim,
    need_normalised,
)
from weightsmith._models.formats.gguf.base.rope import share_turned, state_by_kind
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, EXPERTS, HEAD_NORMS, MLP, MLP_NORM, ROUTER
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_HEADS, _DENSE, _SHARE = "attention.head_count", "first_k_dense_replace", "partial_rotary_factor"
_LOCAL_BASE, _LOCAL_TURNED = "rope.freq_base_swa", "rope.dimension_count_swa"


class Laguna(GgufArchitecture):
    """Laguna; llama.cpp finds by the shape of the gate whether it is one for each head or for each number of it."""

    name = "laguna"
    class_name = "LagunaForCausalLM"
    model_types = ("laguna",)
    layer = {
        **{**ATTENTION, **HEAD_NORMS, **MLP, **MLP_NORM, **ROUTER, **EXPERTS, "attn_gate": "self_attn.g_proj"},
        **{f"{name}_shexp": module.replace("mlp.", "mlp.shared_expert.") for name, module in MLP.items()},
    }
    bare = {"exp_probs_b.bias": "mlp.experts.e_score_correction_bias"}
    setting_names = {_HEADS: "num_attention_heads_per_layer"}
    experts = "num_experts"
    numbers = (
        GgufKey("expert_feed_forward_length", "moe_intermediate_size"),
        GgufKey("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        GgufKey("expert_weights_scale", "moe_routed_scaling_factor", "f32", 1.0),
        GgufKey("leading_dense_block_count", _DENSE, least=0),
    )
    constants = SIGMOID_ROUTER
    fixed = {"attention_bias": False, "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0}
    partial = 1.0
    windows = Windows(4, stated=True, first=True)

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        layers, added = config.get("num_hidden_layers"), dict[str, Any]()
        if config.get("layer_types") is None and type(layers) is int:
            added["layer_types"] = ["full_attention"] * layers
        if config.get("sliding_window") == 0:
            added["sliding_window"] = None
        return super().complete({**config, _DENSE: 1, **added})

    # ---- keys from config.json

    def turned(self, config: GgufConfig) -> int:
        return int(config.number(_SHARE, 1.0, self.rope(config)) * head_dim(config))

    def check_local_rope(self, config: GgufConfig) -> None:
        if "sliding_attention" in config.get("layer_types"):
            config.count("sliding_window")
            config.need("rope_type of sliding_attention", config.rope()[1].get("rope_type", "default"), "default")

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.u32("vocab_size", config.count("vocab_size"))
        keys.put(_HEADS, "i32", _heads(config))
        keys.put(NORMALISED, "bool", True)
        local = config.rope()[1]
        if local.get("rope_theta") is not None:
            keys.f32(_LOCAL_BASE, config.number("rope_theta", within=local))
            keys.u32(_LOCAL_TURNED, int(config.number(_SHARE, 1.0, local) * head_dim(config)))

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        gating, width = config.get("gating"), head_dim(config)
        for number, heads in enumerate(_heads(config)):
            rows = heads if gating in (True, "per-head") else heads * width
            stored = shapes.get(f"blk.{number}.attn_gate.weight", (rows,))[0]
            if stored != rows:
                what = f"gating is {gating!r}, and the gate of layer {number:,} would have {rows:,} rows, not {stored:,}"
                raise FormatError(what, where="config.json", fix="repair gating, or num_attention_heads_per_layer")

    # ---- config.json from the keys

    def take_size(self, values: GgufValues, config: dict[str, Any], name: str, setting: str) -> None:
        if name != _HEADS:
            super().take_size(values, config, name, setting)
            return
        heads = config["num_attention_heads_per_layer"] = values.by_layer(_HEADS, config["num_hidden_layers"])
        config[setting] = heads[0]

    def take_tensors(self, config: dict[str, Any], contents: Contents, where: str) -> None:
        gate = contents.shapes.get("blk.0.attn_gate.weight", (0,))
        config["gating"] = True if gate[0] == config["num_attention_heads"] else "per-element"
        dense, layers = config.pop(_DENSE), config["num_hidden_layers"]
        config["mlp_layer_types"] = ["dense" if number < dense else "sparse" for number in range(layers)]

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        need_normalised(values)
        width = config["head_dim"]
        turned = values.count("rope.dimension_count", width)
        config.pop(_SHARE, None)
        state_by_kind(config, values.float32(_LOCAL_BASE, config["rope_theta"]))
        for kind, count in (("full_attention", turned), ("sliding_attention", values.count(_LOCAL_TURNED, turned))):
            config["rope_parameters"][kind][_SHARE] = share_turned(count, width)
        config["sliding_window"] = config["sliding_window"] or 0


def _heads(config: GgufConfig) -> list[int]:
    """The number of heads of queries of each layer."""
    layers, name = config.count("num_hidden_layers"), "num_attention_heads_per_layer"
    stated = config.get(name)
    if stated is None:
        return [config.count("num_attention_heads")] * layers
    if not isinstance(stated, list) or len(stated) != layers:
        raise config.wrong(name, stated, f"not a number for each of {layers:,} layers")
    return [config.count(name, within={name: heads}) for heads in stated]


FAMILY = GgufFamily((Laguna(),))
