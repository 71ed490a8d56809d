"""Phi 2 and 3, and Phi 4, which is a Phi 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from weightsmith._base.errors import FormatError
from weightsmith._models.formats.gguf.base.architecture import LAYER_NORM, UNTIED, Contents, GgufArchitecture, GgufFamily
from weightsmith._models.formats.gguf.base.rope import ATTENTION_FACTOR
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    ENDS,
    GATE_IN_UP,
    LAYER_SHAPES,
    MIXTRAL_EXPERTS,
    MLP_NORM,
    TensorShape,
)
from weightsmith._models.formats.gguf.base.values import Floats, GgufConfig, GgufKeys, GgufValues


class Phi2(GgufArchitecture):
    """Phi 1, 1.5 and 2."""

    name = "phi2"
    class_name = "PhiForCausalLM"
    model_types = ("phi",)
    square = True
    layer = ATTENTION | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    ends = {**ENDS, "output_norm": "model.final_layernorm"}
    fixed = {**UNTIED, "qk_layernorm": False}
    eps = LAYER_NORM
    partial = 0.5
    activation = "gelu_new"


_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
_ORIGINAL = "rope.scaling.original_context_length"
_CONTEXT = "original_max_position_embeddings"
_MSCALES = ("short_mscale", "long_mscale")


class Phi3(GgufArchitecture):
    """Phi 3, whose long versions divide frequencies by one list of numbers or another (LongRoPE)."""

    name = "phi3"
    class_name = "Phi3ForCausalLM"
    model_types = ("phi3",)
    layer = {
        **{"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"},
        **{"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj", **MLP_NORM},
    }
    shapes: ClassVar[Mapping[str, TensorShape]] = {**LAYER_SHAPES, **GATE_IN_UP}
    partial = 1.0

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        """llama.cpp infers it."""

    def put_attention(self, config: GgufConfig, keys: GgufKeys) -> None:
        window = config.get("sliding_window")
        keys.u32("attention.sliding_window", 0 if window is None else config.count("sliding_window"))

    def put_rope(self, config: GgufConfig, keys: GgufKeys) -> None:
        rope = self.rope(config)
        context = config.count("max_position_embeddings")
        original = config.count("original_max_position_embeddings")  # the one in the settings of RoPE has no effect
        keys.u32(_ORIGINAL, original)
        if rope["rope_type"] not in ("default", "longrope", "su"):
            config.need("rope_type", rope["rope_type"], "longrope")
        if rope["rope_type"] == "default":
            return
        usual = _growth(config.number("factor", context / original, rope), original)
        keys.f32(ATTENTION_FACTOR, config.number("attention_factor", usual, rope))
        for setting, tensor in _FACTORS.items():
            keys.tensors[tensor] = factors = config.numbers(setting, rope)
            if factors.size != (pairs := self.turned(config) // 2):
                what = f"{setting} has {factors.size:,} numbers, and RoPE turns {pairs:,} pairs of a head, by head_dim"
                what += " (hidden_size / num_attention_heads) and partial_rotary_factor"
                raise FormatError(what, where="config.json", fix=f"repair {setting} in config.json, or download it again")

    def take_heads(self, values: GgufValues, config: dict[str, Any], default: int) -> int:
        return default

    def take_attention(self, values: GgufValues, config: dict[str, Any]) -> None:
        slides = "attention.sliding_window" in values
        config["sliding_window"] = values.count("attention.sliding_window") if slides else None

    def take_rope(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        original = values.count(_ORIGINAL, config["max_position_embeddings"])
        config["original_max_position_embeddings"] = original
        if contents.factors.keys() >= set(_FACTORS.values()):
            factors = {setting: _short(contents.factors[name]) for setting, name in _FACTORS.items()}
            scaling = config["rope_scaling"] = {"type": "longrope", **factors}
            usual = np.float32(_growth(config["max_position_embeddings"] / original, original))
            if ATTENTION_FACTOR in values and values.float32(ATTENTION_FACTOR) != float(str(usual)):
                scaling["attention_factor"] = values.float32(ATTENTION_FACTOR)


def _growth(factor: float, context: int) -> float:
    """By what sines and cosines are multiplied where the context grows (Ding et al. 2024). context: tokens, before it grows."""
    return math.sqrt(1 + math.log(factor) / math.log(max(2, context))) if factor > 1 else 1.0


def _short(values: Floats) -> list[float]:
    return [float(str(value)) for value in values]


class PhiMoe(Phi3):
    """Phi-3.5 MoE, which llama.cpp computes otherwise than transformers, as `differs` says."""

    name = "phimoe"
    class_name = "PhimoeForCausalLM"
    model_types = ("phimoe",)
    differs = (
        "llama.cpp does not compute what transformers does: it has RMS norms in place of layer norms, "
        "and the weights of a token's experts have the sum 1 in place of about 2"
    )
    square = True
    layer = {**ATTENTION, **MLP_NORM, "ffn_gate_inp": "block_sparse_moe.gate", **MIXTRAL_EXPERTS}
    shapes = LAYER_SHAPES
    experts = "num_local_experts"
    fixed = {**UNTIED, "attention_bias": True, "lm_head_bias": True}

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The context before it grew is that of the settings of RoPE alone where frequencies are scaled, as in transformers."""
        whole, rope = config.get("max_position_embeddings"), config.get("rope_scaling") or config.get("rope_parameters")
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type") or "default") != "default":
            return {**config, _CONTEXT: rope.get(_CONTEXT, whole)}
        return {_CONTEXT: whole, **config}

    def put_rope(self, config: GgufConfig, keys: GgufKeys) -> None:
        super().put_rope(config, keys)
        rope = self.rope(config)
        if rope["rope_type"] != "default":  # transformers takes these, where Phi-3 has a number that follows from the context
            short, long = (config.number(name, None, rope) for name in _MSCALES)
            config.need("short_mscale", short, long)
            keys.f32(ATTENTION_FACTOR, long)

    def take_rope(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_rope(values, config, contents)
        if scaling := config.get("rope_scaling"):
            scaling.pop("attention_factor", None)
            scaling["rope_type"] = scaling.pop("type")
            scaling |= dict.fromkeys(_MSCALES, values.float32(ATTENTION_FACTOR, 1.0))
            scaling[_CONTEXT] = config[_CONTEXT]


FAMILY = GgufFamily((Phi2(), Phi3(), PhiMoe()))
