"""DeepSeek-V2: latent attention, experts chosen by softmax. Requires a dense model with the same attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from weightsmith._features.mixture.layouts import deepseek_v3
from weightsmith._features.mixture.layouts.deepseek_family import LATENT_KEYS, keys, no_shared, warn_none_shared, warn_shared
from weightsmith.abc.layout import Facts


def _warnings(facts: Facts) -> Iterable[str]:
    if facts.per_token < facts.experts:
        yield (
            "transformers ignores norm_topk_prob: true here, so the weights of the chosen experts sum to less than 1 and the"
            " output is smaller than the base's; set experts_per_token to the number of experts to avoid this"
        )
    yield from warn_shared(facts)
    yield from warn_none_shared(facts)


LAYOUT = replace(
    deepseek_v3.LAYOUT,
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    title="DeepSeek-V2",
    dense=("deepseek_v2",),
    routing="softmax; the chosen experts' weights are divided by their sum (`norm_topk_prob: true`), but not by transformers",
    sigmoid=False,
    min_experts=1,
    take=(*LATENT_KEYS, "mlp_bias"),
    keys=lambda facts: {
        **keys(facts),
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "output_router_logits": False,
    },
    fixed=no_shared,
    warnings=_warnings,
    llama_cpp="the same as the base, unlike transformers; requires a shared expert",
    note="only from dense models with latent attention",
)
