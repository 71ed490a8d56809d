"""DeepSeek-V3: latent attention, experts chosen by sigmoids. Requires a dense model with the same attention."""

from __future__ import annotations

from typing import Any

from weightsmith.mixture.layouts import deepseek_attention as attention
from weightsmith.mixture.layouts.base import PER_EXPERT, ExpertLayout, Facts, moe_config
from weightsmith.mixture.layouts.deepseek_family import SHARED, SIGMOID, correction, one_group, warn_none_shared, warn_shared


def _config(facts: Facts) -> dict[str, Any]:
    return moe_config(
        facts,
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        (*attention.KEYS, "rope_interleave"),
        **one_group(facts),
        topk_method="noaux_tc",
        num_nextn_predict_layers=0,
        output_router_logits=False,
    )


LAYOUT = ExpertLayout(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    title="DeepSeek-V3",
    dense=("deepseek_v3", "youtu"),
    layer=attention.LAYER,
    optional=attention.OPTIONAL,
    router="mlp.gate.weight",
    routing=SIGMOID,
    sigmoid=True,
    tensors=PER_EXPERT,
    shared=SHARED,
    shared_experts=(0, 1),
    min_experts=2,
    config=_config,
    fixed=correction,
    check=attention.check,
    warnings=lambda facts: (*warn_shared(facts), *warn_none_shared(facts)),
    llama_cpp="the same; requires a shared expert",
    note="only from dense models with latent attention; for grouped-query attention `glm4_moe` has the same experts",
)
