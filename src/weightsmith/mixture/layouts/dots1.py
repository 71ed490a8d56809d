"""dots.llm1: DeepSeek-V3's experts with Qwen3's attention."""

from __future__ import annotations

from typing import Any

from weightsmith.mixture.layouts.base import (
    ATTENTION,
    ATTENTION_BIASES,
    NORMS,
    PER_EXPERT,
    QK_NORMS,
    ExpertLayout,
    Facts,
    moe_config,
)
from weightsmith.mixture.layouts.deepseek_family import SHARED, SIGMOID, correction, one_group, warn_none_shared, warn_shared


def _config(facts: Facts) -> dict[str, Any]:
    return moe_config(
        facts,
        ("Dots1ForCausalLM", "dots1"),
        ("head_dim", "sliding_window", "layer_types"),
        **one_group(facts),
        attention_bias=facts.biased,
        output_router_logits=False,
    )


LAYOUT = ExpertLayout(
    name="dots1",
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    title="dots.llm1",
    dense=("qwen3",),
    layer=ATTENTION | NORMS | QK_NORMS,
    optional=(ATTENTION_BIASES,),
    windows="any",
    router="mlp.gate.weight",
    routing=SIGMOID,
    sigmoid=True,
    tensors=PER_EXPERT,
    shared=SHARED,
    shared_experts=(0, 1),
    min_experts=2,
    config=_config,
    fixed=correction,
    warnings=lambda facts: (*warn_shared(facts), *warn_none_shared(facts)),
    llama_cpp="the same; requires a shared expert and as many key heads as query heads",
)
