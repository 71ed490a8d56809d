"""dots.llm1: DeepSeek-V3's experts with Qwen3's attention."""

from __future__ import annotations

from weightsmith._features.mixture.layouts.deepseek_family import one_group, sigmoid_layout
from weightsmith.abc.layout import ATTENTION, ATTENTION_BIASES, NORMS, QK_NORMS

LAYOUT = sigmoid_layout(
    name="dots1",
    architecture="Dots1ForCausalLM",
    title="dots.llm1",
    dense=("qwen3",),
    layer=ATTENTION | NORMS | QK_NORMS,
    optional=(ATTENTION_BIASES,),
    windows="any",
    take=("head_dim", "sliding_window", "layer_types"),
    keys=lambda facts: {**one_group(facts), "attention_bias": facts.biased, "output_router_logits": False},
    llama_cpp="the same; requires a shared expert and as many key heads as query heads",
)
