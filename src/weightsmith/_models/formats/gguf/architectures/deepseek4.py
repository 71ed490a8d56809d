"""DeepSeek-V4: streams that layers mix (mHC), attention to compressed tokens, and experts by a table of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.formats.gguf.base.architecture import (
    MOST_LAYERS,
    UNTIED,
    Contents,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
)
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL, put_scaling
from weightsmith._models.formats.gguf.base.tensors import (
    LAYER_SHAPES,
    MIXTRAL_EXPERTS,
    ROLES,
    WIDTH,
    TensorShape,
    product_of,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues
from weightsmith._models.structure.projections import MIXTRAL

_STREAMS = 4
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS = {"sliding_attention": 0, _SPARSE: 4, _HEAVY: 128}
"""Kinds of layers, and how many tokens each makes one of."""
_RATIOS, _HASHED = "attention.compress_ratios", "hash_layer_count"
_BASE = "attention.compress_rope_freq_base"
_LIMITS = ("swiglu_clamp_exp", "swiglu_clamp_shexp")
_QUERY_RANK, _HEAD = product_of("attention.q_lora_rank"), product_of("attention.key_length")
_INDEX_HEADS, _INDEX_WIDTH = "attention.indexer.head_count", "attention.indexer.key_length"
_GROUPS, _OUT_RANK = "attention.output_group_count", "attention.output_lora_rank"
_SHAPES: Mapping[str, TensorShape] = {
    **LAYER_SHAPES,
    **{"attn_q_a": (_QUERY_RANK, WIDTH), "attn_kv": (_HEAD, WIDTH)},
    "attn_q_b": (product_of("attention.head_count", "attention.key_length"), _QUERY_RANK),
    "attn_output_b": (WIDTH, product_of(_GROUPS, _OUT_RANK)),
    "indexer.attn_q_b": (product_of(_INDEX_HEADS, _INDEX_WIDTH), _QUERY_RANK),
    "indexer.proj": (product_of(_INDEX_HEADS), WIDTH),
}
_ENDS = {f"model.hc_head_{part}.weight": f"hc_head_{part}" for part in ("fn", "base", "scale")}
_ENDS |= {"model.embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"}
"""Tensors outside of the layers: their names in the tables → the Hub's."""
_SAVED = {"model.hc_head.hc_": "hc_head_"}
_FACTORS = ("attention_factor", "mscale", "mscale_all_dim")
"""Settings of YaRN that have no effect, but for the first."""
_HC = {f"hc_{part}_{name}.weight": f"hc_{part}_{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")}


class DeepseekV4(GgufArchitecture):
    """DeepSeek-V4, Flash and Pro."""

    name = "deepseek4"
    class_name = "DeepseekV4ForCausalLM"
    model_types = ("deepseek_v4",)
    layer: ClassVar[Mapping[str, str]] = {
        **{"attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "ffn_gate_inp": "ffn.gate"},
        **{"attn_q_a": "attn.wq_a", "attn_q_b": "attn.wq_b", "attn_q_a_norm": "attn.q_norm"},
        **{"attn_kv": "attn.wkv", "attn_kv_a_norm": "attn.kv_norm"},
        **{"attn_output_a": "attn.wo_a", "attn_output_b": "attn.wo_b"},
        **{name: module.replace("block_sparse_moe.", "ffn.") for name, module in MIXTRAL_EXPERTS.items()},
        **{f"{ROLES[role]}_shexp": f"ffn.shared_experts.{MIXTRAL[f'{role}_proj']}" for role in ("gate", "up", "down")},
        **{f"attn_compressor_{name}": f"attn.compressor.w{name}" for name in ("kv", "gate")},
        **{f"indexer_compressor_{name}": f"attn.indexer.compressor.w{name}" for name in ("kv", "gate")},
        **{"attn_compressor_norm": "attn.compressor.norm", "indexer_compressor_norm": "attn.indexer.compressor.norm"},
        **{"indexer.attn_q_b": "attn.indexer.wq_b", "indexer.proj": "attn.indexer.weights_proj"},
    }
    bare: ClassVar[Mapping[str, str]] = {
        **{"exp_probs_b.bias": "ffn.gate.bias", "ffn_gate_tid2eid.weight": "ffn.gate.tid2eid", **_HC},
        **{"attn_sinks.weight": "attn.attn_sink", "attn_compressor_ape.weight": "attn.compressor.ape"},
        "indexer_compressor_ape.weight": "attn.indexer.compressor.ape",
    }
    ends = {
        **{"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
        **{f"output_hc_{part}": f"model.hc_head_{part}" for part in ("fn", "base", "scale")},
    }
    shapes = _SHAPES
    sizes = {name: setting for name, setting in GgufArchitecture.sizes.items() if name != "feed_forward_length"}
    experts = "n_routed_experts"
    numbers: ClassVar[tuple[GgufKey, ...]] = (
        GgufKey("attention.q_lora_rank", "q_lora_rank"),
        GgufKey("attention.sliding_window", "sliding_window"),
        GgufKey("expert_feed_forward_length", "moe_intermediate_size"),
        GgufKey("expert_shared_count", "n_shared_experts"),
        GgufKey("expert_weights_scale", "routed_scaling_factor", "f32"),
        GgufKey("expert_weights_norm", "norm_topk_prob", "bool"),
        GgufKey(_INDEX_HEADS, "index_n_heads"),
        GgufKey(_INDEX_WIDTH, "index_head_dim"),
        GgufKey("attention.indexer.top_k", "index_topk"),
        GgufKey(_GROUPS, "o_groups"),
        GgufKey(_OUT_RANK, "o_lora_rank"),
        GgufKey("hyper_connection.count", "hc_mult"),
        GgufKey("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
        GgufKey("hyper_connection.epsilon", "hc_eps", "f32"),
        GgufKey("embedding_length_out", "hidden_size", times="hc_mult"),
    )
    constants = {"expert_gating_func": 4}
    fixed = {
        **{**UNTIED, "scoring_func": "sqrtsoftplus", "hc_mult": _STREAMS, "attention_bias": False, "mlp_bias": False},
        "num_key_value_heads": 1,
    }
    partial = 64 / 512

    # ---- names

    def canonical(self, name: str) -> str:
        name = next((new + name.removeprefix(old) for old, new in _SAVED.items() if name.startswith(old)), name)
        name = next((table for table, hub in _ENDS.items() if hub == name), name)
        return super().canonical(name).replace(".attn.norm.weight", ".attn.kv_norm.weight")

    def published(self, canonical: str) -> str:
        return _ENDS.get(canonical) or super().published(canonical).removeprefix("model.")

    # ---- keys from config.json

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Kinds of layers, which published files have as numbers or leave out, and the share of a head that RoPE turns."""
        layers, ratios, added = config.get("num_hidden_layers", 43), config.get("compress_ratios"), dict[str, Any]()
        if type(layers) is not int or not 0 < layers <= MOST_LAYERS:
            return config
        if config.get("layer_types") is None:
            names = {ratio: kind for kind, ratio in _KINDS.items()}
            listed = [names.get(ratio, ratio) for ratio in ratios[:layers]] if isinstance(ratios, list) else None
            added["layer_types"] = listed or [_HEAVY if i < 2 or i % 2 == 0 else _SPARSE for i in range(layers)]
        if config.get("mlp_layer_types") is None:
            hashed = config.get("num_hash_layers", 3)
            added["mlp_layer_types"] = ["hash_moe" if i < hashed else "moe" for i in range(layers)]
        turned, width = config.get("qk_rope_head_dim"), config.get("head_dim", 512)
        if config.get("partial_rotary_factor") is None and type(turned) is int and type(width) is int and width > 0:
            added["partial_rotary_factor"] = turned / width
        if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
            added["rope_parameters"] = {"rope_type": "default"}
        return {**config, **added}

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        layers = config.count("num_hidden_layers")
        for name, kinds in (("layer_types", set(_KINDS)), ("mlp_layer_types", {"hash_moe", "moe"})):
            stated = config.get(name)
            if not isinstance(stated, list) or len(stated) != layers or not kinds.issuperset(map(str, stated)):
                raise config.wrong(name, stated, f"not one of {', '.join(sorted(kinds))} for each of {layers:,} layers")
        mlps, hashed = config.get("mlp_layer_types"), config.get("mlp_layer_types").count("hash_moe")
        config.need("mlp_layer_types", mlps, ["hash_moe" if i < hashed else "moe" for i in range(layers)])
        rates = {kind: ratio for kind, ratio in _KINDS.items() if ratio}
        config.need("compress_rates", config.get("compress_rates", rates), rates)
        main, compressed = _ropes(config)
        config.need("rope_type of main", main.get("rope_type", "default"), "default")
        config.need("attention_factor", compressed["attention_factor"], 1)
        for rope in (main, compressed):
            share = config.number("partial_rotary_factor", self.partial)
            config.need("partial_rotary_factor", rope.get("partial_rotary_factor", share), share)

    def rope(self, config: GgufConfig) -> dict[str, Any]:
        return _ropes(config)[0]

    def put_attention(self, config: GgufConfig, keys: GgufKeys) -> None:
        """All layers have a window, beside which they attend to compressed tokens."""

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        layers = config.count("num_hidden_layers")
        keys.put(_RATIOS, "i32", [_KINDS[kind] for kind in config.get("layer_types")])
        keys.u32(_HASHED, config.get("mlp_layer_types").count("hash_moe"))
        keys.f32(_BASE, config.number("rope_theta", within=_ropes(config)[1]))
        for name in _LIMITS:
            keys.put(name, "f32", [config.number("swiglu_limit")] * layers)

    def put_rope(self, config: GgufConfig, keys: GgufKeys) -> None:
        rope = {name: value for name, value in _ropes(config)[1].items() if name not in _FACTORS}
        put_scaling(config, rope, keys)  # llama.cpp turns by none, whatever the factor is

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        kinds, mlps = config.get("layer_types"), config.get("mlp_layer_types")
        for i, (kind, mlp) in enumerate(zip(kinds, mlps, strict=True)):
            for said, name, what in (
                (_KINDS[kind] > 0, "attn_compressor_kv.weight", f"layer_types, layer {i} has {kind}"),
                (kind == _SPARSE, "indexer.proj.weight", f"layer_types, layer {i} has {kind}"),
                (mlp == "hash_moe", "ffn_gate_tid2eid.weight", f"mlp_layer_types, layer {i} is {mlp}"),
            ):
                if said != (f"blk.{i}.{name}" in shapes):
                    raise FormatError(f"by {what}, unlike its tensors", where="config.json", fix="repair it")

    # ---- config.json from the keys

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        layers = config["num_hidden_layers"]
        names = {ratio: kind for kind, ratio in _KINDS.items()}
        ratios = values.get(_RATIOS)
        if (
            not isinstance(ratios, np.ndarray)
            or ratios.ndim != 1
            or len(ratios) < layers
            or not {*ratios[:layers].tolist()} <= {*names}
        ):
            raise values.wrong(_RATIOS, ratios, f"not one of 0, 4 and 128 for each of {layers:,} layers")
        config["layer_types"] = [names[ratio] for ratio in ratios[:layers].tolist()]
        hashed = values.count(_HASHED, least=0)
        config["mlp_layer_types"] = ["hash_moe" if i < hashed else "moe" for i in range(layers)]
        config["num_nextn_predict_layers"] = 0
        config["swiglu_limit"] = _limit(values, layers)
        share = config.setdefault("partial_rotary_factor", self.partial)
        base = config["rope_theta"]
        config["compress_rope_theta"] = values.float32(_BASE)
        main = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}
        scaling = {"rope_type": "default", **config.pop("rope_scaling", {})}
        compressed = {**scaling, "rope_theta": config["compress_rope_theta"], "partial_rotary_factor": share}
        config["rope_parameters"] = {"main": main, "compress": compressed}


def _limit(values: GgufValues, layers: int) -> float:
    """The largest gate of all experts. Raises Unsupported if layers differ."""
    limits = [values.numbers_by_layer(name, layers) for name in _LIMITS]
    if {*limits[0]} != {*limits[1]} or len({*limits[0]}) != 1:
        raise Unsupported(f"{values.where}: layers with different {_LIMITS[0]}", where=values.where, fix=USE_ORIGINAL)
    return float(str(np.float32(limits[0][0])))


def _ropes(config: GgufConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of RoPE in layers that attend to a window alone, and in the others."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(stated, dict):
        raise config.wrong("rope_parameters", stated, "not an object")
    main, compressed = (stated.get(name) for name in ("main", "compress"))
    if not isinstance(main, dict) or not isinstance(compressed, dict):
        main, compressed = {}, {name: value for name, value in stated.items() if name not in ("rope_theta", "main", "compress")}
    main = {"rope_theta": config.get("rope_theta"), **main}
    compressed = {"rope_theta": config.get("compress_rope_theta"), "attention_factor": 1.0, **compressed}
    compressed["rope_type"] = compressed.get("rope_type") or compressed.get("type") or "default"
    return main, compressed


FAMILY = GgufFamily((DeepseekV4(),))
