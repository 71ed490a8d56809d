"""Llama 4: attention to chunks of the text in three of four layers, and experts whose input has their score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.formats.gguf.base.architecture import Contents, GgufArchitecture, GgufFamily, GgufKey, head_dim
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    LAYER_SHAPES,
    MLP,
    MLP_NORM,
    SHARED_EXPERT,
    WIDTH,
    SplitPart,
    SplitTensor,
    product_of,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_STEP, _EXPERT_WIDTH = "interleave_moe_layer_step", "expert_feed_forward_length"
_EVERY = 4
"""Every so many layers, one has no RoPE and attends to everything."""
_WITHOUT_NORM = 128
"""The number of experts of the model whose queries and keys llama.cpp does not normalise: Maverick."""
_SHARED = (product_of(_EXPERT_WIDTH), WIDTH)


class Llama4(GgufArchitecture):
    """Llama 4. Its experts are two tensors a layer, whose rows are llama.cpp's columns."""

    name = "llama4"
    class_name = "Llama4ForCausalLM"
    model_types = ("llama4_text",)
    layer = {
        **{**ATTENTION, **MLP_NORM, "ffn_gate_inp": "feed_forward.router"},
        **{name: module.replace("mlp.", "feed_forward.") for name, module in (MLP | SHARED_EXPERT).items()},
    }
    splits = (
        SplitTensor(
            "feed_forward.experts.gate_up_proj",
            (SplitPart("ffn_gate_exps.weight", transposed=True), SplitPart("ffn_up_exps.weight", transposed=True)),
            columns="runs",
        ),
        SplitTensor("feed_forward.experts.down_proj", (SplitPart("ffn_down_exps.weight", transposed=True),)),
    )
    shapes = {**LAYER_SHAPES, "ffn_gate_shexp": _SHARED, "ffn_up_shexp": _SHARED, "ffn_down_shexp": _SHARED[::-1]}
    sizes = {**GgufArchitecture.sizes, "feed_forward_length": "intermediate_size_mlp"}
    experts = "num_local_experts"
    numbers = (GgufKey(_STEP, _STEP, default=1), GgufKey(_EXPERT_WIDTH, "intermediate_size"))
    fixed = {
        **{"attention_bias": False, "attention_chunk_size": 8192, "no_rope_layer_interval": _EVERY},
        **{"floor_scale": 8192, "attn_scale": 0.1},
    }
    scaled = True

    # ---- keys from config.json

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        tuned = config.get("attn_temperature_tuning", True)  # published files have a number
        config.need("attn_temperature_tuning", bool(tuned), True)
        normalised = config.count("num_local_experts") != _WITHOUT_NORM
        config.need("use_qk_norm", config.get("use_qk_norm", True), normalised)
        layers = range(1, config.count("num_hidden_layers") + 1)
        turned = [int(i % _EVERY != 0) for i in layers]
        for name, expected in (
            ("no_rope_layers", turned),
            ("layer_types", ["chunked_attention" if here else "full_attention" for here in turned]),
            ("moe_layers", [i - 1 for i in layers if i % config.count(_STEP) == 0]),
        ):
            config.need(name, config.get(name) or expected, expected)

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        super().put_heads(config, keys)
        keys.u32("vocab_size", config.count("vocab_size"))
        keys.u32("rope.dimension_count", head_dim(config))

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        step = config.count(_STEP)
        for i in range(config.count("num_hidden_layers")):
            has_experts = f"blk.{i}.ffn_gate_inp.weight" in shapes
            if has_experts != ((i + 1) % step == 0):
                what = f"{_STEP} is {step:,}, and layer {i:,} has {'' if has_experts else 'no '}experts"
                raise FormatError(what, where="config.json", fix=f"repair {_STEP}, or download the model again")

    # ---- config.json from the keys

    def take_attention(self, values: GgufValues, config: dict[str, Any]) -> None:
        if values.get("attention.sliding_window") == 0:
            what = f"{self.name}.attention.sliding_window is 0, and transformers has layers that attend to chunks"
            raise Unsupported(what, where=values.where, fix=USE_ORIGINAL)

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        config["use_qk_norm"] = config["num_local_experts"] != _WITHOUT_NORM
        config["attn_temperature_tuning"] = True


FAMILY = GgufFamily((Llama4(),))
