"""Gemma 3n: four streams of which each layer computes one (AltUp), a path beside attention, and embeddings of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._models.formats.gguf.base.architecture import GELU, Contents, GgufArchitecture, GgufFamily, GgufKey, Windows
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, ENDS, HEAD_NORMS, MLP, NORMS_AROUND
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_STREAMS = 4
_OWN_KEYS = 20
"""The layers that have keys and values of their own; those behind them use those of the last two of these."""
_SPARSE, _SHARE = 10, 0.95
"""The layers whose MLPs keep only the largest gates, and the share that they leave out."""
_LOCAL_BASE = "rope.freq_base_swa"


class Gemma3n(GgufArchitecture):
    """Gemma 3n E2B and E4B, of a text."""

    name = "gemma3n"
    class_name = "Gemma3nForCausalLM"
    model_types = ("gemma3n_text",)
    layer = {
        **{**ATTENTION, **HEAD_NORMS, **MLP, **NORMS_AROUND},
        **{"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"},
        **{"altup_correct_coef": "altup.correction_coefs", "altup_predict_coef": "altup.prediction_coefs"},
        **{"altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm"},
        **{"laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right"},
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
    bare = {"altup_correct_scale.weight": "altup.correct_output_scale"}
    ends = {
        **{**ENDS, "altup_proj": "model.altup_projections.{}", "altup_unembd_proj": "model.altup_unembed_projections.{}"},
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
    numbers = (
        GgufKey("altup.active_idx", "altup_active_idx", default=0, least=0),
        GgufKey("altup.num_inputs", "altup_num_inputs", default=_STREAMS),
        GgufKey("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
        GgufKey("final_logit_softcapping", "final_logit_softcapping", "f32"),
    )
    fixed = {
        **{"attention_bias": False, "altup_active_idx": 0, "altup_num_inputs": _STREAMS, "altup_correct_scale": True},
        **{"laurel_rank": 64, "hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0},
    }
    activation = GELU
    windows = Windows(5)

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json with one width of the MLPs, which it may state for each layer."""
        widths = config.get("intermediate_size")
        alike = isinstance(widths, list) and len(widths) == config.get("num_hidden_layers") and len(set(map(str, widths))) == 1
        return {**config, "intermediate_size": widths[0]} if alike and isinstance(widths, list) else config

    # ---- keys from config.json

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        layers = config.count("num_hidden_layers")
        shared = config.count("num_kv_shared_layers", 0, least=0)
        config.need("num_kv_shared_layers", shared, max(layers - _OWN_KEYS, 0))
        sparse = _sparsity(layers)
        config.need("activation_sparsity_pattern", config.get("activation_sparsity_pattern") or _default(layers), sparse)

    def check_local_rope(self, config: GgufConfig) -> None:
        """Layers with a window have a base of their own."""

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        layers = config.count("num_hidden_layers")
        keys.put("feed_forward_length", "i32", [config.count("intermediate_size")] * layers)
        keys.f32(_LOCAL_BASE, config.number("rope_theta", within=config.rope()[1]))
        keys.u32("attention.shared_kv_layers", max(layers - _OWN_KEYS, 0))
        scale = NormalDist().inv_cdf(_SHARE)
        scales = [scale if share else float("-inf") for share in _sparsity(layers)]
        keys.put("activation_sparsity_scale", "f32", scales)
        slides = [kind == "sliding_attention" for kind in Windows(5).layer_types(layers, slides=True)]
        keys.put("attention.sliding_window_pattern", "bool", slides)

    # ---- config.json from the keys

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        layers = config["num_hidden_layers"]
        config["num_kv_shared_layers"] = max(layers - _OWN_KEYS, 0)
        config["activation_sparsity_pattern"] = _sparsity(layers)
        config["vocab_size_per_layer_input"] = config["vocab_size"]
        config["hidden_activation"] = GELU
        full = {"rope_type": "default", **config.pop("rope_scaling", {}), "rope_theta": config.pop("rope_theta")}
        local = {"rope_type": "default", "rope_theta": values.float32(_LOCAL_BASE, 10_000.0)}
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}

    # ---- tensors

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        for name in ("altup_proj.weight", "altup_unembd_proj.weight"):
            if shapes.get(name, (0,))[0] != _STREAMS - 1:
                what = f"{shapes.get(name, (0,))[0]:,} matrices, and llama.cpp has {_STREAMS - 1}"
                raise FormatError(what, where=self.ends[name.removesuffix(".weight")], fix="download the model again")

    def rows_of(self, name: str, config: GgufConfig) -> int:
        return config.count("vocab_size") if name == "per_layer_token_embd.weight" else 0

    def unread(self, config: GgufConfig) -> Mapping[str, str]:
        layers = range(_OWN_KEYS, config.count("num_hidden_layers"))
        modules = ("attn_k", "attn_v", "attn_k_norm")
        return {f"blk.{i}.{module}.weight": f"blk.0.{module}.weight" for i in layers for module in modules}


def _sparsity(layers: int) -> list[float]:
    """The share of gates that each layer leaves out, as llama.cpp has it in its code."""
    return [_SHARE if i < _SPARSE else 0.0 for i in range(layers)]


def _default(layers: int) -> list[float]:
    """The same in transformers, where config.json does not say it."""
    return _sparsity(layers) if layers > _SPARSE else [0.0] * layers


FAMILY = GgufFamily((Gemma3n(),))
