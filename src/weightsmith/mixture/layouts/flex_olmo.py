"""FlexOlmo: OLMo 2 with experts, with norms after attention and MLP."""

from __future__ import annotations

from weightsmith.mixture.layouts.base import ATTENTION, ATTENTION_BIASES, PER_EXPERT, POST_NORMS, QK_NORMS, ExpertLayout
from weightsmith.mixture.layouts.olmo_family import ROUTING, config

LAYOUT = ExpertLayout(
    name="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    model_type="flex_olmo",
    title="FlexOlmo",
    dense=("olmo2",),
    layer=ATTENTION | POST_NORMS | QK_NORMS,
    optional=(ATTENTION_BIASES,),
    norms="all heads",
    router="mlp.gate.weight",
    routing=ROUTING,
    tensors=PER_EXPERT,
    config=lambda facts: config(facts, ("FlexOlmoForCausalLM", "flex_olmo")),
    llama_cpp="not supported",
)
