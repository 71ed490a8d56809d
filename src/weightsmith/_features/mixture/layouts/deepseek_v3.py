"""DeepSeek-V3: latent attention, experts chosen by sigmoids. Requires a dense model with the same attention."""

from __future__ import annotations

from weightsmith._features.mixture.layouts.deepseek_family import (
    LATENT,
    LATENT_KEYS,
    LATENT_OPTIONAL,
    check_latent,
    one_group,
    sigmoid_layout,
)

LAYOUT = sigmoid_layout(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    title="DeepSeek-V3",
    dense=("deepseek_v3", "youtu"),
    layer=LATENT,
    optional=LATENT_OPTIONAL,
    take=(*LATENT_KEYS, "rope_interleave"),
    keys=lambda facts: {
        **one_group(facts),
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "output_router_logits": False,
    },
    check=check_latent,
    llama_cpp="the same; requires a shared expert",
    note="only from dense models with latent attention; for grouped-query attention `glm4_moe` has the same experts",
)
