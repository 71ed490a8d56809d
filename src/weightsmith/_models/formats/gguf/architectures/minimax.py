"""MiniMax M2: Mixtral's layout, with norms of all heads together and a bias of the router. M3 attends to chosen blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from weightsmith._base.errors import Unsupported
from weightsmith._models.formats.gguf.base.architecture import (
    SIGMOID_ROUTER,
    UNTIED,
    Contents,
    GgufArchitecture,
    GgufFamily,
    GgufKey,
    head_dim,
)
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL
from weightsmith._models.formats.gguf.base.tensors import (
    ATTENTION,
    HEAD_NORMS,
    LAYER_SHAPES,
    MIXTRAL_EXPERTS,
    MLP,
    MLP_NORM,
    ROUTER,
    ROUTER_BIAS,
    WIDTH,
    SplitPart,
    SplitTensor,
    product_of,
)
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues


class MiniMaxM2(GgufArchitecture):
    """MiniMax M2, all of whose MLPs are experts. Released models state in `rotary_dim` how much of a head RoPE turns."""

    name = "minimax-m2"
    class_name = "MiniMaxM2ForCausalLM"
    model_types = ("minimax_m2",)
    layer = {**ATTENTION, **HEAD_NORMS, **MLP_NORM, "ffn_gate_inp": "block_sparse_moe.gate", **MIXTRAL_EXPERTS}
    bare = {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
    experts = "num_local_experts"
    numbers = (GgufKey("expert_feed_forward_length", "intermediate_size"),)
    constants = SIGMOID_ROUTER
    fixed = {**UNTIED, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}
    partial = 1.0

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        if config.get("rotary_dim") is None or config.get("partial_rotary_factor") is not None:
            return config
        settings = GgufConfig(config)
        return {**config, "partial_rotary_factor": settings.count("rotary_dim") / head_dim(settings)}

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        config["rotary_dim"] = values.count("rope.dimension_count", config["head_dim"])


_DENSE, _SHARED, _NORMALISED = "leading_dense_block_count", "expert_shared_count", "expert_weights_norm"
_HEADS, _WIDTH = "attention.indexer.head_count", "attention.indexer.key_length"
_BLOCK = "attention.indexer.block_size"
_CACHE = 256
"""llama.cpp keeps room for a multiple of so many tokens, which blocks must fill."""
_FULL, _SPARSE = "full_attention", "minimax_m3_sparse"
_PUBLISHED = {
    **{"index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim"},
    **{"index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks"},
    "index_local_blocks": "sparse_local_block",
}
"""transformers' settings, and what `sparse_attention_config` calls them."""


class MiniMaxM3Text(GgufArchitecture):
    """The language model of MiniMax M3 as transformers has it alone; layers with experts have an indexer, and only these."""

    name = "minimax-m3"
    class_name = "MiniMaxM3VLForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("minimax_m3_vl_text", "minimax_m3_vl")
    layer: ClassVar[Mapping[str, str]] = {
        **{**ATTENTION, **HEAD_NORMS, **MLP_NORM, **ROUTER},
        **{"ffn_down": "mlp.down_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj"},
        **{f"indexer.{part}": f"self_attn.indexer.{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")},
    }
    bare: ClassVar[Mapping[str, str]] = {**ROUTER_BIAS, "ffn_down_exps.weight": "mlp.experts.down_proj"}
    splits: ClassVar[tuple[SplitTensor, ...]] = tuple(
        SplitTensor(name, (SplitPart(f"ffn_gate{end}.weight"), SplitPart(f"ffn_up{end}.weight")))
        for name, end in (
            ("mlp.gate_up_proj.weight", ""),
            ("mlp.experts.gate_up_proj", "_exps"),
            ("mlp.shared_experts.gate_up_proj.weight", "_shexp"),
        )
    )
    shapes = {
        **LAYER_SHAPES,
        **{"indexer.q_proj": (product_of(_HEADS, _WIDTH), WIDTH), "indexer.k_proj": (product_of(_WIDTH), WIDTH)},
    }
    setting_names = {_SHARED: "(shared_intermediate_size / intermediate_size)"}
    shift = 1.0
    sizes = {**GgufArchitecture.sizes, "feed_forward_length": "dense_intermediate_size"}
    experts = "num_local_experts"
    numbers = (
        GgufKey("expert_feed_forward_length", "intermediate_size"),
        GgufKey(_DENSE, "first_k_dense_replace", default=0, least=0),
        GgufKey("expert_weights_scale", "routed_scaling_factor", "f32"),
        GgufKey(_HEADS, "index_n_heads"),
        GgufKey(_WIDTH, "index_head_dim"),
        GgufKey(_BLOCK, "index_block_size"),
        GgufKey("attention.indexer.top_k", "index_topk_blocks"),
        GgufKey("attention.indexer.local_blocks", "index_local_blocks", least=0),
    )
    constants = SIGMOID_ROUTER
    fixed = {**UNTIED, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "scoring_func": "sigmoid", "use_routing_bias": True}
    activations = {"swigluoai": "silu"}  # the settings of `fixed` say what it is
    partial = 1.0

    def fits(self, config: Mapping[str, Any]) -> bool:
        return "vision_config" not in config

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Settings of the indexer and kinds of layers, which published files have in other forms."""
        sparse, frequent = config.get("sparse_attention_config"), config.get("moe_layer_freq")
        added: dict[str, Any] = {}
        if isinstance(sparse, dict):
            added |= {name: sparse[published] for name, published in _PUBLISHED.items() if published in sparse}
            if isinstance(kinds := sparse.get("sparse_attention_freq"), list) and config.get("layer_types") is None:
                added["layer_types"] = [_SPARSE if kind else _FULL for kind in kinds]
        if isinstance(frequent, list) and config.get("mlp_layer_types") is None:
            added["mlp_layer_types"] = ["sparse" if kind else "dense" for kind in frequent]
        return super().complete({**config, **added})

    # ---- keys from config.json

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        layers, dense = config.count("num_hidden_layers"), config.count("first_k_dense_replace", 0, least=0)
        kinds = [_FULL if i < dense else _SPARSE for i in range(layers)]
        config.need("layer_types", config.get("layer_types") or [_FULL] * layers, kinds)
        heads = config.count("num_key_value_heads", config.count("num_attention_heads"))
        config.need("index_n_heads", config.count("index_n_heads"), heads)
        if _CACHE % (block := config.count("index_block_size")):
            raise config.wrong("index_block_size", block, f"which does not divide {_CACHE}, as llama.cpp needs it")
        config.need("rotary_dim", config.count("rotary_dim", self.turned(config)), self.turned(config))

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        shared, width = config.count("shared_intermediate_size"), config.count("intermediate_size")
        if shared % width:
            raise config.wrong("shared_intermediate_size", shared, f"not a multiple of intermediate_size, {width:,}")
        keys.u32(_SHARED, shared // width)
        keys.put(_NORMALISED, "bool", True)  # llama.cpp takes false where a file does not say it

    # ---- config.json from the keys

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        if not values.truth(_NORMALISED, False):
            what = f"{self.name}.{_NORMALISED} is not true, and transformers always normalises"
            raise Unsupported(what, where=values.where, fix=USE_ORIGINAL)
        config["shared_intermediate_size"] = values.count(_SHARED) * config["intermediate_size"]
        layers, dense = config["num_hidden_layers"], config.pop("first_k_dense_replace")
        config["layer_types"] = [_FULL if i < dense else _SPARSE for i in range(layers)]
        config["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(layers)]
        config["rotary_dim"] = values.count("rope.dimension_count", config["head_dim"])
        share = config.pop("partial_rotary_factor", 1.0)
        base = config.pop("rope_theta")
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}


class MiniMaxM3(MiniMaxM3Text):
    """MiniMax M3, which is published as a model for images. Its names are other ones than those of the language model alone."""

    layer = {
        **{**ATTENTION, **HEAD_NORMS, **MLP, **MLP_NORM, "ffn_gate_inp": "block_sparse_moe.gate", **MIXTRAL_EXPERTS},
        **{f"{name}_shexp": module.replace("mlp.", "block_sparse_moe.shared_experts.") for name, module in MLP.items()},
        **{f"indexer.{part}": f"self_attn.index_{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")},
    }
    bare = MiniMaxM2.bare
    splits = ()
    readable = False

    def fits(self, config: Mapping[str, Any]) -> bool:
        return not super().fits(config)


FAMILY = GgufFamily((MiniMaxM2(), MiniMaxM3Text(), MiniMaxM3()))
