"""Why a layout cannot hold a dense model, judged by names, shapes and config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from weightsmith.mixture.dense import Dense
from weightsmith.mixture.layouts.base import ExpertLayout
from weightsmith.mixture.layouts.dense_config import rope_scaling, rotary_share, semantics

_PREFIX = "model.layers."
_OUTSIDE = frozenset({"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})


def why_not(layout: ExpertLayout, base: Dense, experts: int, shared: int) -> str:
    """Why a layout cannot hold a base with these numbers of routed and shared experts; "" if it can."""
    config = semantics(base.donor.config, base.donor.label)
    problems = (*layout.check(config), *_config(layout, config), *_names(layout, base), *_shapes(layout, base, config))
    return next(iter((*problems, *_counts(layout, experts, shared))), "")


def _config(layout: ExpertLayout, config: Mapping[str, Any]) -> Iterator[str]:
    kinds = set(config["layer_types"])
    if layout.windows == "none" and "sliding_attention" in kinds:
        yield f"it has no sliding window, but the base has one of {config['sliding_window']} tokens"
    if layout.windows == "all" and len(kinds) > 1:
        yield "either all of its layers have a sliding window or none do, but only some layers of the base have one"
    if not layout.partial and (share := rotary_share(config)) != 1:
        yield f"its rotary embeddings rotate the whole head, but the base's rotate {share:g} of it"
    if any(isinstance(value, Mapping) for value in rope_scaling(config).values()):
        yield "all its layers share rope_parameters, but the base's layers have their own"
    if not all(_rotated(config)):
        yield "all its layers have rotary embeddings, but not all of the base's do"
    if not layout.multipliers:
        for key, neutral in _neutral(config).items():
            if not math.isclose(value := config.get(key) or neutral, neutral, rel_tol=1e-6):
                yield f"it has no {key}, but the base's is {value:g}"


def _rotated(config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has rotary embeddings: some of SmolLM3's have none."""
    if (given := config.get("no_rope_layers")) is not None:
        return [bool(one) for one in given]
    every = config.get("no_rope_layer_interval") or 0
    return [(i + 1) % every != 0 for i in range(config["num_hidden_layers"])] if every else []


def _neutral(config: Mapping[str, Any]) -> dict[str, float]:
    """The values of Granite's factors that have no effect."""
    size = config.get("head_dim")
    factors = dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0)
    return factors | ({"attention_multiplier": size**-0.5} if size else {})


def _names(layout: ExpertLayout, base: Dense) -> Iterator[str]:
    if base.prefix != _PREFIX:
        yield f"its layers are at {_PREFIX}, but the base's are at {base.prefix}"
    if other := sorted(set(base.outside) - _OUTSIDE):
        yield f"it has no place for {other[0]}"
    for names in map(set, (layer.rest for layer in base.layers)):
        if missing := sorted(layout.layer - names - layout.fillable):
            yield f"it requires {missing[0]}, which the base lacks"
        for group in (*layout.optional, layout.fillable):
            if names & group and not group <= names:
                yield f"it requires {sorted(group - names)[0]} with {sorted(group & names)[0]}"
        if more := sorted(names - layout.layer.union(*layout.optional)):
            yield f"it has no place for {more[0]}"


def _shapes(layout: ExpertLayout, base: Dense, config: Mapping[str, Any]) -> Iterator[str]:
    """Attention whose shapes contradict config.json, and norms of another width."""
    heads, size, groups = (config.get(key) or 0 for key in ("num_attention_heads", "head_dim", "num_key_value_heads"))
    if "self_attn.k_proj.weight" not in layout.layer or not heads * size * groups:
        return
    wide, narrow, together = heads * size, groups * size, layout.norms == "all heads"
    shapes = {
        "self_attn.q_proj.weight": (wide, base.hidden),
        "self_attn.k_proj.weight": (narrow, base.hidden),
        "self_attn.v_proj.weight": (narrow, base.hidden),
        "self_attn.o_proj.weight": (base.hidden, wide),
        "self_attn.q_norm.weight": (wide if together else size,),
        "self_attn.k_norm.weight": (narrow if together else size,),
    }
    for layer in base.layers:
        for name, shape in shapes.items():
            if name in layer.rest and layer.rest[name].shape != shape:
                what = f" ({layout.norms} normed)" if name.endswith("_norm.weight") else ""
                yield f"its {name} is {list(shape)}{what}, but the base's is {list(layer.rest[name].shape)}"


def _counts(layout: ExpertLayout, experts: int, shared: int) -> Iterator[str]:
    low, high = layout.shared_experts
    if not low <= shared <= high:
        wanted = (
            "no shared expert" if high == 0 else f"{low} to {high} shared experts" if low < high else f"{low} shared expert"
        )
        yield f"it requires {wanted}, not {shared}"
    if experts < layout.min_experts:
        yield f"it requires at least {layout.min_experts} experts, not {experts}"
