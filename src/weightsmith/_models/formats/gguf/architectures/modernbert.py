"""ModernBERT (GTE, Granite Embedding), with a head that scores, too.

Every third layer attends to all of a text, the first of them too, and the others to a window around each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsmith._models.formats.gguf.base.architecture import Contents, GgufFamily
from weightsmith._models.formats.gguf.base.encoder import MASKED_HEADS, Encoder
from weightsmith._models.formats.gguf.base.tensors import GATE_IN_UP, LAYER_SHAPES
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_LAYER = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
_ENDS = {"token_embd": "embeddings.tok_embeddings", "token_embd_norm": "embeddings.norm", "output_norm": "final_norm"}
_EVERY = "attention.sliding_window_pattern"
_DEFAULTS: Mapping[str, Any] = {"norm_eps": 1e-5, "local_attention": 128, "max_position_embeddings": 8192}
_FIXED = {"attention_bias": False, "mlp_bias": False, "norm_bias": False}
_LEGACY = {"rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta"}


class _ModernBert(Encoder):
    """What both have in common."""

    name = "modern-bert"
    model_types = ("modernbert",)
    modules = ("model.",)
    layers = "layers."
    eps = ("attention.layer_norm_epsilon", "norm_eps")
    rotary = True
    layer = _LAYER
    shapes = {**LAYER_SHAPES, **GATE_IN_UP}
    defaults = _DEFAULTS
    vocabulary = "gpt2"

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        bases = {name: config[stated] for name, stated in _LEGACY.items() if stated in config}
        return super().complete({**bases, **config})

    def check(self, config: GgufConfig) -> None:
        if config.get("hidden_activation") != "silu":
            super().check(config)
        config.need_all(self.fixed)

    def put_attention(self, config: GgufConfig, keys: GgufKeys) -> None:
        layers = config.count("num_hidden_layers")
        stated = config.get("layer_types")
        every = config.count("global_attn_every_n_layers", _period(stated))
        if stated is not None:
            config.need("layer_types", stated, _layer_types(layers, every))
        keys.u32("attention.sliding_window", config.count("local_attention"))
        keys.u32(_EVERY, every)
        keys.f32("rope.freq_base_swa", config.number("rope_theta", within=config.rope()[1]))
        if config.get("hidden_activation") == "silu":
            keys.put("hidden_activation", "str", "silu")

    def take_attention(self, values: GgufValues, config: dict[str, Any]) -> None:
        every, bases = values.count(_EVERY, 3), (config.pop("rope_theta"), values.float32("rope.freq_base_swa", 10_000.0))
        kinds = ("full_attention", "sliding_attention")
        config["local_attention"] = values.count("attention.sliding_window")
        config["global_attn_every_n_layers"] = every
        config["layer_types"] = _layer_types(config["num_hidden_layers"], every)
        config |= {name: base for name, base in zip(_LEGACY.values(), bases, strict=True)}
        config["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in zip(kinds, bases, strict=True)
        }

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_more(values, config, contents)
        activation = values.get("hidden_activation", config.pop("hidden_act"))
        if activation not in ("gelu", "silu"):
            raise values.wrong("hidden_activation", activation, "and neither gelu nor silu")
        config["hidden_activation"] = activation


class ModernBert(_ModernBert):
    """ModernBERT."""

    class_name = "ModernBertModel"
    ends = _ENDS
    unused = {r"head\..*": "the head that predicts masked tokens", **MASKED_HEADS}
    fixed = _FIXED


class ModernBertRanks(_ModernBert):
    """ModernBERT with a head that scores the mean of the vectors."""

    class_name = "ModernBertForSequenceClassification"
    prefix = "model."
    head = ("head.", "classifier.")
    ranks = True
    ends = {**_ENDS, "cls": "head.dense", "cls.norm": "head.norm", "cls.output": "classifier"}
    unused = {}
    defaults = {**_DEFAULTS, "classifier_pooling": "cls"}
    fixed = {**_FIXED, "classifier_pooling": "mean", "classifier_bias": False, "classifier_activation": "gelu"}


def _layer_types(layers: int, every: int) -> list[str]:
    return ["sliding_attention" if i % every else "full_attention" for i in range(layers)]


def _period(layer_types: object) -> int:
    """After how many layers one attends to everything again; 3 if none does."""
    full = [i for i, kind in enumerate(layer_types) if kind == "full_attention"] if isinstance(layer_types, list) else []
    return full[1] if len(full) > 1 else max(3, len(layer_types) if isinstance(layer_types, list) else 0)


FAMILY = GgufFamily((ModernBert(), ModernBertRanks()))
