"""DeepSeek-V2: latent attention, experts chosen by softmax. Requires a dense model with the same attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weightsmith.mixture.layouts import deepseek_attention as attention
from weightsmith.mixture.layouts.base import PER_EXPERT, ExpertLayout, Facts, moe_config
from weightsmith.mixture.layouts.deepseek_family import SHARED, keys, no_shared, warn_none_shared, warn_shared


def _config(facts: Facts) -> dict[str, Any]:
    return moe_config(
        facts,
        ("DeepseekV2ForCausalLM", "deepseek_v2"),
        (*attention.KEYS, "mlp_bias"),
        **keys(facts),
        topk_method="greedy",
        n_group=None,
        topk_group=None,
        scoring_func="softmax",
        output_router_logits=False,
    )


def _warnings(facts: Facts) -> Iterable[str]:
    if facts.per_token < facts.experts:
        yield (
            "transformers ignores norm_topk_prob: true here, so the weights of the chosen experts sum to less than 1 and the"
            " output is smaller than the base's; set experts_per_token to the number of experts to avoid this"
        )
    yield from warn_shared(facts)
    yield from warn_none_shared(facts)


LAYOUT = ExpertLayout(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    title="DeepSeek-V2",
    dense=("deepseek_v2",),
    layer=attention.LAYER,
    optional=attention.OPTIONAL,
    router="mlp.gate.weight",
    routing="softmax; the chosen experts' weights are divided by their sum (`norm_topk_prob: true`), but not by transformers",
    tensors=PER_EXPERT,
    shared=SHARED,
    shared_experts=(0, 1),
    config=_config,
    fixed=no_shared,
    check=attention.check,
    warnings=_warnings,
    llama_cpp="the same as the base, unlike transformers; requires a shared expert",
    note="only from dense models with latent attention",
)
