"""MiniMax-Text-01: Mixtral's experts, layers of lightning attention, and a residual that norms have passed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from weightsmith._base.errors import FormatError
from weightsmith._models.formats.gguf.base.architecture import (
    COMPUTED,
    MOST_LAYERS,
    Contents,
    GgufArchitecture,
    GgufFamily,
    head_dim,
)
from weightsmith._models.formats.gguf.base.mamba import need_attention, need_states
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    LAYER_SHAPES,
    MIXTRAL_EXPERTS,
    MLP_NORM,
    WIDTH,
    layer_number,
    product_of,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_FULL, _LINEAR = "full_attention", "linear_attention"
_RECURRENT, _INTERVAL = "attention.recurrent_layers", "full_attention_interval"
_EVERY = 8
"""Where a file does not say which layers have lightning attention, llama.cpp takes all but the last of every so many."""
_SCALE, _TURNED = "residual_scale", "rope.dimension_count"
_PARTS = ("full_attn", "linear_attn", "mlp")
_ALPHAS, _BETAS = ([f"{part}_{name}_factor" for part in _PARTS] for name in ("alpha", "beta"))
_FULL_END, _LINEAR_END = ".self_attn.o_proj.weight", ".self_attn.out_proj.weight"
"""What layers that attend call their last projection, and what those with lightning attention call it."""
_INNER = ("attention.head_count", "attention.key_length")


class MiniMax01(GgufArchitecture):
    """MiniMax-Text-01 and M1 in the form of transformers, which ignores `rotary_dim`."""

    name = "minimax-01"
    class_name = "MiniMaxForCausalLM"
    model_types = ("minimax",)
    layer: ClassVar[Mapping[str, str]] = {
        **{**ATTENTION, **MLP_NORM, **MIXTRAL_EXPERTS, "ffn_gate_inp": "block_sparse_moe.gate"},
        **{"attn_qkv": "self_attn.qkv_proj", "attn_gate": "self_attn.output_gate", "attn_norm_2": "self_attn.norm"},
    }
    unused = {r"model\.layers\.[0-9]+\.self_attn\.(?:slope_rate|(?:query|key|diagonal)_decay)": COMPUTED}
    shapes = {
        **LAYER_SHAPES,
        **{"attn_qkv": (product_of(3, *_INNER), WIDTH), "attn_gate": (product_of(*_INNER), WIDTH)},
    }
    experts = "num_local_experts"
    fixed = {"shared_intermediate_size": 0, "postnorm": True}

    # ---- which layers attend

    def of_config(self, config: Mapping[str, Any]) -> Self:
        kinds = config.get("layer_types")
        return self.with_linear(kind == _LINEAR for kind in (kinds if isinstance(kinds, list) else ()))

    def of_keys(self, values: GgufValues) -> Self:
        layers = values.count("block_count")
        return self if layers > MOST_LAYERS else self.with_linear(_recurrent(values, layers))

    # ---- keys from config.json

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        layers = config.get("num_hidden_layers", 32)
        if config.get("layer_types") is not None or type(layers) is not int or layers > MOST_LAYERS:
            return config
        return {**config, "layer_types": [_LINEAR if number % 2 else _FULL for number in range(layers)]}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        layers, kinds = config.count("num_hidden_layers"), config.get("layer_types")
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (_FULL, _LINEAR) for kind in kinds):
            raise config.wrong("layer_types", kinds, f"not {_FULL} or {_LINEAR} for each of {layers:,} layers")
        for name in _BETAS:
            config.need(name, config.number(name, 1), 1)
        alphas = {name: config.number(name, 1) for name in _ALPHAS}
        for name, alpha in alphas.items():
            config.need(name, alpha, alphas[_ALPHAS[0]])

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        keys.f32(_SCALE, config.number(_ALPHAS[0], 1))
        keys.u32(_TURNED, config.count("rotary_dim", head_dim(config)))
        recurrent = [kind == _LINEAR for kind in config.get("layer_types")]
        if recurrent != _every(_EVERY, len(recurrent)):
            keys.put(_RECURRENT, "bool", recurrent)

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        for number, kind in enumerate(config.get("layer_types")):
            if (kind == _LINEAR) != (f"blk.{number}.attn_qkv.weight" in shapes):
                what = f"by layer_types, layer {number} has {kind}, unlike its tensors"
                raise FormatError(what, where="config.json", fix="repair it")
        need_attention(config, attends := [kind == _FULL for kind in config.get("layer_types")])
        need_states(config, attends)

    # ---- config.json from the keys

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        recurrent = _recurrent(values, config["num_hidden_layers"])
        config["layer_types"] = [_LINEAR if here else _FULL for here in recurrent]
        config |= dict.fromkeys(_ALPHAS, values.float32(_SCALE)) | dict.fromkeys(_BETAS, 1)
        config["rotary_dim"] = values.count(_TURNED, config["head_dim"])

    # ---- tensors

    def canonical(self, name: str) -> str:
        return super().canonical(name).replace(_LINEAR_END, _FULL_END)

    def published(self, canonical: str) -> str:
        name = super().published(canonical)
        return name.replace(_FULL_END, _LINEAR_END) if layer_number(name) in self.linear else name


def _every(interval: int, layers: int) -> list[bool]:
    """Which layers have lightning attention: all but the last of every so many."""
    return [(number + 1) % interval > 0 for number in range(layers)]


def _recurrent(values: GgufValues, layers: int) -> list[bool]:
    """The same of a file. Raises FormatError."""
    stated = values.get(_RECURRENT)
    if stated is None:
        return _every(values.count(_INTERVAL, _EVERY), layers)
    if not isinstance(stated, np.ndarray) or stated.shape != (layers,) or stated.dtype != np.bool_:
        raise values.wrong(_RECURRENT, stated, f"not a truth value for each of {layers:,} layers")
    return [bool(here) for here in stated]


FAMILY = GgufFamily((MiniMax01(),))
