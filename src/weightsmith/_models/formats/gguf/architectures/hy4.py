"""Hy 4: streams that layers mix, gated attention by a common latent vector to chosen tokens, and experts with a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._models.formats.gguf.architectures.deepseek import (
    EXPERT_NUMBERS,
    INDEXER,
    INDEXER_NUMBERS,
    INDEXER_SHAPES,
    LATENT_PARTS,
    DeepseekV2,
)
from weightsmith._models.formats.gguf.base.architecture import SIGMOID_ROUTER, UNTIED, Contents, GgufFamily, GgufKey
from weightsmith._models.formats.gguf.base.rope import USE_ORIGINAL
from weightsmith._models.formats.gguf.base.tensors import ENDS, ROUTER_BIAS, SplitPart, SplitTensor
from weightsmith._models.formats.gguf.base.values import GgufConfig, GgufKeys, GgufValues

_DENSE, _TYPES, _LIMIT = "first_k_dense_replace", "attention.indexer.types", "swiglu_clamp_exp"
_PARTS = ("fn", "base", "scale")
_ENDS = {f"model.hc_head.hc_head_{part}.weight": f"model.hc_head.hc_head_{part}" for part in _PARTS}
"""Tensors outside of the layers whose names are not a module's: in the tables → the Hub's."""
_SAVED = {
    **{".hc_pre.hc_head.": ".hc_head.", ".mlp.linear_gate.": ".mlp.gate_proj."},
    ".mlp.shared_experts.linear_gate.": ".mlp.shared_experts.gate_proj.",
    **{f".hc_pre.hc_{part}_layer.": f".hc_{part}_layer.hc_pre." for part in ("attn", "mlp")},
}
"""Parts of names as transformers 5 saves them, and as they are published."""


class HyV4(DeepseekV2):
    """Hy 4, which llama.cpp computes otherwise than transformers, as `differs` says."""

    name = "hy_v4"
    class_name = "HYV4ForCausalLM"
    model_types = ("hy_v4",)
    differs = (
        "llama.cpp does not compute what transformers does: RoPE turns pairs of neighbours, as the model was trained, "
        "and transformers turns the two halves of a head"
    )
    layer = {
        **{name: module for name, module in DeepseekV2.layer.items() if not name.endswith("_exps")},
        **{**INDEXER, "attn_gate": "self_attn.linear_gate"},
    }
    bare: ClassVar[Mapping[str, str]] = {
        **{**ROUTER_BIAS, "attn_sinks.weight": "self_attn.learnable_sink_param"},
        "ffn_down_exps.weight": "mlp.experts.down_proj",
        **{f"hc_attn_{part}.weight": f"hc_attn_layer.hc_pre.hc_{part}" for part in _PARTS},
        **{f"hc_ffn_{part}.weight": f"hc_mlp_layer.hc_pre.hc_{part}" for part in _PARTS},
    }
    ends = {**ENDS, **{f"output_hc_{part}": f"model.hc_head.hc_head_{part}" for part in _PARTS}}
    splits: ClassVar[tuple[SplitTensor, ...]] = (
        *LATENT_PARTS,
        SplitTensor("mlp.experts.gate_up_proj", (SplitPart("ffn_gate_exps.weight"), SplitPart("ffn_up_exps.weight"))),
    )
    shapes = {**DeepseekV2.shapes, **INDEXER_SHAPES}
    numbers = (
        *(number for number in EXPERT_NUMBERS if "group" not in number.name),
        *INDEXER_NUMBERS,
        GgufKey("hyper_connection.count", "hc_mult"),
        GgufKey("hyper_connection.epsilon", "hc_eps", "f32"),
        GgufKey("hyper_connection.magnitude", "hc_magnitude", "f32"),
    )
    constants = SIGMOID_ROUTER
    fixed = {**UNTIED, "attention_bias": False, "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1}

    # ---- names

    def canonical(self, name: str) -> str:
        for saved, published in _SAVED.items():
            name = name.replace(saved, published)
        return next((table for table, hub in _ENDS.items() if hub == name), super().canonical(name))

    def published(self, canonical: str) -> str:
        return _ENDS.get(canonical) or super().published(canonical)

    # ---- keys from config.json

    def complete(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The number of layers without experts, and as many heads of keys as of queries, whatever is stated."""
        return super().complete({**config, "num_key_value_heads": None, _DENSE: config.get(_DENSE, 1)})

    def check_groups(self, config: GgufConfig) -> None:
        """There is one group."""

    def has_plain_queries(self, layers: int, tokens: int) -> bool:
        return False

    def check(self, config: GgufConfig) -> None:
        super().check(config)
        config.count("n_shared_experts")
        config.need("rope_type", self.rope(config)["rope_type"], "default")
        width, turned = config.count("index_head_dim"), config.count("qk_rope_head_dim")
        if width <= turned:
            raise config.wrong("index_head_dim", width, f"not more than qk_rope_head_dim, {turned:,}, as llama.cpp needs it")

    def put_more(self, config: GgufConfig, keys: GgufKeys) -> None:
        layers = config.count("num_hidden_layers")
        keys.put(_TYPES, "bool", _has_indexer(config))
        keys.put(_LIMIT, "f32", [config.number("swiglu_limit")] * layers)

    def check_tensors(self, config: GgufConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_tensors(config, shapes)
        for number, has_indexer in enumerate(_has_indexer(config)):
            if has_indexer != (f"blk.{number}.indexer.proj.weight" in shapes):
                what = f"by indexer_types, layer {number} is {'full' if has_indexer else 'shared'}, unlike its tensors"
                raise FormatError(what, where="config.json", fix="repair it")

    # ---- config.json from the keys

    def take_more(self, values: GgufValues, config: dict[str, Any], contents: Contents) -> None:
        super().take_more(values, config, contents)
        layers, stated = config["num_hidden_layers"], values.get(_TYPES)
        if not isinstance(stated, np.ndarray) or stated.shape != (layers,):
            raise values.wrong(_TYPES, stated, f"not a truth value for each of {layers:,} layers")
        config["indexer_types"] = ["full" if has_indexer else "shared" for has_indexer in stated]
        dense = config.pop(_DENSE)
        config["mlp_layer_types"] = ["dense" if number < dense else "sparse" for number in range(layers)]
        limits = {*values.numbers_by_layer(_LIMIT, layers)}
        if len(limits) > 1:
            raise Unsupported(f"layers with different {_LIMIT}", where=values.where, fix=USE_ORIGINAL)
        config["swiglu_limit"] = float(str(np.float32(limits.pop())))


def _has_indexer(config: GgufConfig) -> list[bool]:
    """Whether each layer has an indexer, or takes the tokens that a layer before it has chosen."""
    layers, types = config.count("num_hidden_layers"), config.get("indexer_types")
    if types is None:
        return [number == 0 or number % 4 == 1 for number in range(layers)]
    if not isinstance(types, list) or len(types) != layers or {*map(str, types)} - {"full", "shared"} or types[0] != "full":
        raise config.wrong("indexer_types", types, f"not full or shared for each of {layers:,} layers, the first one full")
    return [kind == "full" for kind in types]


FAMILY = GgufFamily((HyV4(),))
