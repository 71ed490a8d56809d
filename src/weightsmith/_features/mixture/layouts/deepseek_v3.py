"""DeepSeek-V3: latent attention, experts chosen by sigmoids. Requires a dense model with the same attention."""

from __future__ import annotations

from weightsmith._features.mixture.layouts import deepseek_family as family

LAYOUT = family.sigmoid_layout(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    title="DeepSeek-V3",
    dense=("deepseek_v3", "youtu"),
    layer=family.LATENT,
    optional=family.LATENT_OPTIONAL,
    take=(*family.LATENT_KEYS, "rope_interleave"),
    keys=lambda facts: {
        **family.one_group(facts),
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "output_router_logits": False,
    },
    check=family.check_latent,
    llama_cpp="the same; requires a shared expert",
    note="only from dense models with latent attention; for grouped-query attention `glm4_moe` has the same experts",
)
