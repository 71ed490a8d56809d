"""OLMoE: norms before attention and MLP, queries and keys normalised over all heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightsmith.mixture.layouts.base import (
    ATTENTION,
    ATTENTION_BIASES,
    NORMS,
    PER_EXPERT,
    QK_NORMS,
    UNDIVIDED,
    ExpertLayout,
    warn_undivided,
)
from weightsmith.mixture.layouts.olmo_family import ROUTING, config


def _check(dense: Mapping[str, Any]) -> Iterable[str]:
    heads, size = dense.get("num_attention_heads") or 0, dense.get("head_dim") or 0
    if heads * size != dense.get("hidden_size"):
        yield f"its heads together are as wide as the hidden state; the base has {heads} heads of {size}"


LAYOUT = ExpertLayout(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    title="OLMoE",
    dense=(),
    layer=ATTENTION | NORMS | QK_NORMS,
    optional=(ATTENTION_BIASES,),
    norms="all heads",
    router="mlp.gate.weight",
    routing=ROUTING,
    tensors=PER_EXPERT,
    config=lambda facts: config(facts, ("OlmoeForCausalLM", "olmoe"), clip_qkv=facts.config.get("clip_qkv")),
    warnings=warn_undivided,
    llama_cpp=f"{UNDIVIDED} (by its source)",
    check=_check,
    note="no dense model in transformers has its norms; OLMo 2 has norms after attention and MLP, so it becomes FlexOlmo",
)
