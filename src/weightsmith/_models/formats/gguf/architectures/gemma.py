"""Gemma: three versions, and Gemma 4, whose layers are of two kinds. Gemma 3's vision half."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from weightsmith._base.errors import Unsupported
from weightsmith._models.formats.gguf.base.architecture import (
    GELU,
    MOST_LAYERS,
    TIED,
    Contents,
    GgufArchitecture,
    GgufFamily,
    Windows,
    head_dim,
)
from weightsmith._models.formats.gguf.base.rope import QUOTIENTS, USE_ORIGINAL
from weightsmith._models.formats.gguf.base.tensors import ATTENTION, ENDS, HEAD_NORMS, MLP, NORMS_AROUND
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues
from weightsmith._models.formats.gguf.base.vision import SIGLIP, TANH_ONLY, Images, VisionHalf


class Gemma(GgufArchitecture):
    """The first Gemma."""

    name = "gemma"
    class_name = "GemmaForCausalLM"
    model_types = ("gemma",)
    shift = 1.0
    fixed = TIED
    activation = GELU
    activations = {"gelu": GELU}  # so transformers reads it


_LOCAL_BASE = 10_000.0


class Gemma2(GgufArchitecture):
    """Gemma 2, every second layer of which has a window."""

    name = "gemma2"
    class_name = "Gemma2ForCausalLM"
    model_types = ("gemma2",)
    layer = {**ATTENTION, **MLP, **NORMS_AROUND}
    shift = 1.0
    activation = GELU
    windows = Windows(2, default=4096)
    largest: ClassVar[int] = 46
    """Layers of the 27B model, whose attention is scaled by the mean width of a head, not by the width."""

    def put_attention(self, config: GgufConfig, keys: GgufKeys) -> None:
        super().put_attention(config, keys)
        layers, width = config.count("num_hidden_layers"), config.count("hidden_size")
        scalar = self._query_scalar(layers, width, config.count("num_attention_heads")) or head_dim(config)
        config.need("query_pre_attn_scalar", config.number("query_pre_attn_scalar"), float(scalar))
        self.put_caps(config, keys)

    def put_caps(self, config: GgufConfig, keys: GgufKeys) -> None:
        """How large scores and logits may be."""
        keys.f32("attn_logit_softcapping", config.number("attn_logit_softcapping"))
        keys.f32("final_logit_softcapping", config.number("final_logit_softcapping"))

    def check_local_rope(self, config: GgufConfig) -> None:
        """Gemma 3's layers with a window have a base of their own."""

    def take_attention(self, values: GgufValues, config: dict[str, Any]) -> None:
        super().take_attention(values, config)
        scalar = self._query_scalar(config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"])
        config |= {"hidden_activation": GELU, "query_pre_attn_scalar": scalar or config["head_dim"]}
        self.take_caps(values, config)

    def take_caps(self, values: GgufValues, config: dict[str, Any]) -> None:
        """How large scores and logits may be."""
        config["attn_logit_softcapping"] = values.float32("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = values.float32("final_logit_softcapping", 30.0)

    def _query_scalar(self, layers: int, width: int, heads: int) -> int:
        """What attention is divided by the root of, in the largest model; 0 in others: the width of a head."""
        return width // heads if layers == self.largest else 0


class Gemma3(Gemma2):
    """Gemma 3, whose layers with a window have a RoPE of their own."""

    name = "gemma3"
    class_name = "Gemma3ForCausalLM"
    model_types = ("gemma3_text",)
    layer = {**ATTENTION, **HEAD_NORMS, **MLP, **NORMS_AROUND}
    windows = Windows(6)
    largest = 62

    def put_caps(self, config: GgufConfig, keys: GgufKeys) -> None:
        config.need("attn_logit_softcapping", config.get("attn_logit_softcapping"), None)
        if config.get("final_logit_softcapping") is not None:
            keys.f32("final_logit_softcapping", config.number("final_logit_softcapping"))
        keys.f32("rope.freq_base_swa", config.number("rope_theta", within=config.rope()[1]))

    def take_caps(self, values: GgufValues, config: dict[str, Any]) -> None:
        config["rope_local_base_freq"] = values.float32("rope.freq_base_swa", _LOCAL_BASE)
        if "final_logit_softcapping" in values:
            config["final_logit_softcapping"] = values.float32("final_logit_softcapping")


class GemmaEmbedding(Gemma2):
    """EmbeddingGemma: Gemma 3 whose tokens attend to what follows them. It may have two matrices behind the pooling."""

    name = "gemma-embedding"
    class_name = "Gemma3TextModel"
    model_types = ("gemma3_text",)
    layer = {**ATTENTION, **HEAD_NORMS, **MLP, **NORMS_AROUND}
    windows = Windows(6)
    largest = 0
    bidirectional = True
    fixed = TIED

    def fits(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("use_bidirectional_attention"))

    def put_caps(self, config: GgufConfig, keys: GgufKeys) -> None:
        config.need("attn_logit_softcapping", config.get("attn_logit_softcapping"), None)
        keys.f32("rope.freq_base_swa", config.number("rope_theta", within=config.rope()[1]))

    def take_caps(self, values: GgufValues, config: dict[str, Any]) -> None:
        config |= {
            "rope_local_base_freq": values.float32("rope.freq_base_swa", _LOCAL_BASE),
            "use_bidirectional_attention": True,
        }

    def hub_name(self, name: str) -> str | None:
        plain_name = super().hub_name(name)
        return None if plain_name is None else plain_name.removeprefix("model.")


_STILL = 1e30
"""By which frequencies are divided so that nothing turns."""


class Gemma4(GgufArchitecture):
    """Gemma 4: layers that attend to everything have wider heads, and fewer of keys and values.

    Transformers writes what is different in them to `per_layer_config`; published files say `global_head_dim` and
    `num_global_key_value_heads`. In these layers, RoPE turns only some pairs of each half of a head. llama.cpp turns all, and
    divides the frequencies of the others by a huge number.
    """

    name = "gemma4"
    class_name = "Gemma4ForCausalLM"
    model_types = ("gemma4_text",)
    layer = {
        **{**ATTENTION, **HEAD_NORMS, **MLP, **NORMS_AROUND, "ffn_gate_inp": "router.proj"},
        **{"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"},
        **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)},
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    }
    bare = {
        **{"layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale"},
        **{"ffn_down_exps.scale": "router.per_expert_scale", "ffn_down_exps.weight": "experts.down_proj"},
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    }
    ends = {
        **{**ENDS, "per_layer_token_embd": "model.embed_tokens_per_layer"},
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
    fixed = {"attention_bias": False}
    activation = GELU
    windows = Windows(6, stated=True)
    tokenizer = "gemma4"
    setting_names = {
        **dict.fromkeys(("attention.key_length", "attention.value_length"), "global_head_dim"),
        **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), "head_dim"),
        "attention.head_count_kv": "num_key_value_heads (num_global_key_value_heads in layers without a window)",
    }

    def owns(self, values: GgufValues) -> bool:
        return True  # with experts or without

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Transformers' class has the last layer attend to everything, whatever config.json says."""
        layers, types = config.get("num_hidden_layers"), config.get("layer_types")
        if types is None and type(layers) is int and 0 < layers <= MOST_LAYERS:
            types = Windows(6).layer_types(layers, slides=True)
        return {**config, "layer_types": [*types[:-1], "full_attention"]} if isinstance(types, list) and types else config

    def put_heads(self, config: GgufConfig, keys: GgufKeys) -> None:
        """In `put_more`: they are of two kinds."""

    def check_local_rope(self, config: GgufConfig) -> None:
        """Layers with a window have a base of their own."""

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        layers, slides = config.count("num_hidden_layers"), _slides(config)
        wide, kv_heads = _global(config, "head_dim", 512), _global(config, "num_key_value_heads", 0)
        narrow = config.count("head_dim")
        for name in ("key", "value"):
            keys.u32(f"attention.{name}_length", wide)
            keys.u32(f"attention.{name}_length_swa", narrow)
        local_heads = config.count("num_key_value_heads", config.count("num_attention_heads"))
        if kv_heads:
            keys.put("attention.head_count_kv", "i32", [local_heads if is_local else kv_heads for is_local in slides])
        keys.u32("rope.dimension_count", wide)
        keys.u32("rope.dimension_count_swa", narrow)
        rope, local_rope = config.rope()
        keys.f32("rope.freq_base_swa", config.number("rope_theta", within=local_rope))
        shared = config.count("num_kv_shared_layers", 0, least=0)
        keys.u32("attention.shared_kv_layers", shared)
        if config.get("use_double_wide_mlp", False):
            width = config.count("intermediate_size")
            keys.put("feed_forward_length", "i32", [width * (1 if i < layers - shared else 2) for i in range(layers)])
        keys.u32("embedding_length_per_layer_input", config.count("hidden_size_per_layer_input", 0, least=0))
        tokens = config.count("vocab_size")
        if config.count("hidden_size_per_layer_input", 0, least=0):
            config.need("vocab_size_per_layer_input", config.get("vocab_size_per_layer_input", tokens), tokens)
        if config.get("final_logit_softcapping") is not None:
            keys.f32("final_logit_softcapping", config.number("final_logit_softcapping"))
        if config.get("enable_moe_block", False):
            keys.u32("expert_count", config.count("num_experts"))
            keys.u32("expert_used_count", config.count("top_k_experts"))
            keys.u32("expert_feed_forward_length", config.count("moe_intermediate_size"))
        config.need("use_bidirectional_attention", config.get("use_bidirectional_attention") == "all", False)
        config.need("rope_type", rope["rope_type"], "proportional")
        turned = int(wide * config.number("partial_rotary_factor", 1.0, rope) / 2)
        keys.tensors[QUOTIENTS] = np.array([1.0] * turned + [_STILL] * (wide // 2 - turned), np.float32)

    def put_rope(self, config: GgufConfig, keys: GgufKeys) -> None:
        """In `put_more`."""

    def take_size(self, values: GgufValues, config: dict[str, Any], name: str, setting: str) -> None:
        if setting not in ("num_key_value_heads", "intermediate_size"):  # the others are in `take_more`: one for each layer
            super().take_size(values, config, name, setting)

    def take_heads(self, values: GgufValues, config: dict[str, Any], default: int) -> int:
        return default

    def take_rope(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_rope(values, config, replace(contents, factors={}))

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        layers, shapes = config["num_hidden_layers"], contents.shapes
        wide, config["head_dim"] = values.count("attention.key_length"), values.count("attention.key_length_swa")
        config["global_head_dim"] = wide
        width, double = self._take_layers(values, config)
        config["attention_k_eq_v"] = any(
            f"blk.{i}.attn_k.weight" in shapes and f"blk.{i}.attn_v.weight" not in shapes for i in range(layers)
        )
        config["intermediate_size"], config["use_double_wide_mlp"] = width, double
        config["hidden_size_per_layer_input"] = values.count("embedding_length_per_layer_input", 0, least=0)
        config["vocab_size_per_layer_input"] = config["vocab_size"]
        config["hidden_activation"] = GELU
        if "final_logit_softcapping" in values:
            config["final_logit_softcapping"] = values.float32("final_logit_softcapping")
        config["enable_moe_block"] = "expert_count" in values
        if config["enable_moe_block"]:
            config["num_experts"], config["top_k_experts"] = values.count("expert_count"), values.count("expert_used_count")
            config["moe_intermediate_size"] = values.count("expert_feed_forward_length")
        quotients = contents.factors.get(QUOTIENTS)
        share = 1.0 if quotients is None else float(2 * np.count_nonzero(quotients == 1) / wide)
        full = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": config.pop("rope_theta")}
        local = {"rope_type": "default", "rope_theta": values.float32("rope.freq_base_swa", _LOCAL_BASE)}
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}

    def _take_layers(self, values: GgufValues, config: dict[str, Any]) -> tuple[int, bool]:
        """Set the heads of keys, of which the file has a number for each layer; width of MLPs, whether some are wider."""
        layers = config["num_hidden_layers"]
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        heads = values.by_layer("attention.head_count_kv", layers)
        local, full = ({n for n, kind in zip(heads, slides, strict=True) if kind == is_local} for is_local in (True, False))
        shared = config["num_kv_shared_layers"] = values.count("attention.shared_kv_layers", 0, least=0)
        widths = values.by_layer("feed_forward_length", layers)
        double = [widths[0] * (1 if i < layers - shared else 2) for i in range(layers)]
        if len(local) > 1 or len(full) > 1 or widths not in ([widths[0]] * layers, double):
            what = "layers of one kind with different numbers of heads, or MLPs of other widths"
            raise Unsupported(what, where=values.where, fix=USE_ORIGINAL)
        config["num_key_value_heads"] = next(iter(local or full))
        config["num_global_key_value_heads"] = next(iter(full or local))
        return widths[0], widths == double and shared > 0


def _slides(config: GgufConfig) -> list[bool]:
    """Whether each layer attends to a window alone."""
    layers = config.count("num_hidden_layers")
    types = config.get("layer_types") or Windows(6).layer_types(layers, slides=True)
    if not isinstance(types, list) or len(types) != layers:
        raise config.wrong("layer_types", types, f"not one for each of {layers:,} layers")
    return [kind == "sliding_attention" for kind in types]


def _global(config: GgufConfig, name: str, default: int) -> int:
    """A number of the layers that attend to everything; `default`, which may be 0, where config.json does not say it."""
    per_layer: Any = config.get("per_layer_config")
    if not isinstance(per_layer, dict):
        return config.count(f"num_global_{name[4:]}" if name.startswith("num_") else f"global_{name}", default, least=0)
    stated = [
        settings.get(name)
        for i, slides in enumerate(_slides(config))
        if not slides and isinstance(settings := per_layer.get(str(i)), dict)
    ]
    if any(number != stated[0] for number in stated):
        raise config.wrong("per_layer_config", per_layer, f"not one {name} for all layers that attend to everything")
    return config.count(name, default, {name: stated[0] if stated else None}, least=0)


class Gemma3Vision(VisionHalf):
    """SigLIP, whose patches are pooled."""

    model_type = "gemma3"
    name = "gemma3"
    blocks = "vision_tower.encoder.layers."
    layer = SIGLIP
    ends = {
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.post_ln": "vision_tower.post_layernorm",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    }
    bare = {"mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight"}
    activations = TANH_ONLY
    unused = ("vision_tower.head.", "vision_tower.embeddings.position_ids")
    types = {"mm.input_projection.weight": "F16", "v.patch_embd.weight": "F32"}
    shifted = ("mm.soft_emb_norm.weight",)
    defaults = {"hidden_act": GELU, "layer_norm_eps": 1e-6}

    def keys_of(self, images: Images) -> dict[str, int | None]:
        """The width in patches of the square that is pooled into one row; None if it is llama.cpp's default, 4."""
        side = math.isqrt(images.processor.count("image_seq_length", 256))
        scale = images.vision.count("image_size") // images.vision.count("patch_size") // side
        return {"vision.projector.scale_factor": None if scale in (0, 4) else scale}


FAMILY = GgufFamily((Gemma(), Gemma2(), GemmaEmbedding(), Gemma3(), Gemma4()), vision=(Gemma3Vision(),))
