"""LFM2, whose layers are short convolutions or attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsmith._base.files import show
from weightsmith._models.formats.gguf.values import Config, Put, Values

CONVOLUTION, ATTENTION = "conv", "full_attention"
_HEADS = "attention.head_count_kv"


def put_shortconv(given: Config, put: Put) -> None:
    """The keys of a GGUF file. Raises FormatError."""
    layers, heads = given.count("num_hidden_layers"), given.count("num_attention_heads")
    types, kv_heads = given.get("layer_types"), given.count("num_key_value_heads", heads)
    if types is None and isinstance(own := given.get("full_attn_idxs"), list):
        types = [ATTENTION if i in own else CONVOLUTION for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(each in (CONVOLUTION, ATTENTION) for each in types):
        raise given.wrong("layer_types", types, f"and not {CONVOLUTION} or {ATTENTION} for each of {layers:,} layers")
    put(_HEADS, "i32", [kv_heads if each == ATTENTION else 0 for each in types])
    put("vocab_size", "u32", given.count("vocab_size"))
    if given.get("block_auto_adjust_ff_dim", False):
        width = 2 * given.count("intermediate_size", given.get("block_ff_dim")) // 3
        if given.get("block_ffn_dim_multiplier") is not None:
            width = int(given.number("block_ffn_dim_multiplier") * width)
        unit = given.count("block_multiple_of")
        put("feed_forward_length", "u32", -(-width // unit) * unit)


def take_shortconv(found: Values, config: dict[str, Any], *_: object) -> None:
    """The settings of config.json. Raises FormatError."""
    heads, layers = found.get(_HEADS), config["num_hidden_layers"]
    if not isinstance(heads, np.ndarray) or heads.shape != (layers,) or heads.dtype.kind not in "iu" or not heads.any():
        raise found.wrong(_HEADS, show(heads), f"and not a whole number for each of {layers:,} layers")
    most = int(heads.max())
    if not np.isin(heads, (0, most)).all():
        raise found.wrong(_HEADS, heads, "and not one number in all layers with attention")
    config["num_key_value_heads"] = most
    config["layer_types"] = [ATTENTION if each else CONVOLUTION for each in heads.tolist()]
    config["block_auto_adjust_ff_dim"] = False
