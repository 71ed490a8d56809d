"""Which windows of attention transformers applies, and ExLlamaV2 and exllamav3 do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from weightsmith._models.formats.config import window_difference

USED = {"sliding_window": 512, "use_sliding_window": True}

CONFIGS: list[tuple[str, str, Mapping[str, Any], int | None]] = [
    ("phi3", "Phi3ForCausalLM", {"sliding_window": 2047}, 2047),
    ("phi3", "Phi3ForCausalLM", {}, None),
    ("mistral", "MistralForCausalLM", {}, 4096),
    ("mistral", "MistralForCausalLM", {"sliding_window": None}, None),
    ("mixtral", "MixtralForCausalLM", {}, None),
    ("mixtral", "MixtralForCausalLM", {"sliding_window": 4096}, 4096),
    ("llama", "LlamaForCausalLM", {"sliding_window": 512}, None),
    ("qwen2", "Qwen2ForCausalLM", {**USED, "use_sliding_window": False}, None),
    ("qwen2", "Qwen2ForCausalLM", USED, None),
    ("qwen2", "Qwen2ForCausalLM", {**USED, "num_hidden_layers": 29}, 512),
    ("qwen2", "Qwen2ForCausalLM", {**USED, "max_window_layers": 2}, 512),
    ("qwen3", "Qwen3ForCausalLM", {**USED, "layer_types": ["full_attention", "sliding_attention"] * 2}, 512),
    ("qwen3", "Qwen3ForCausalLM", {**USED, "layer_types": ["full_attention"] * 4}, None),
    ("qwen3_moe", "Qwen3MoeForCausalLM", {"sliding_window": 512}, None),
    ("qwen3_moe", "Qwen3MoeForCausalLM", USED, 512),
]


@pytest.mark.parametrize(("model_type", "architecture", "changes", "window"), CONFIGS)
def test_the_window_is_that_of_transformers(
    model_type: str, architecture: str, changes: Mapping[str, Any], window: int | None
) -> None:
    import transformers

    config = {"num_hidden_layers": 4, "max_position_embeddings": 8192, **changes}
    texts = [what for what, _, _ in window_difference({"architectures": [architecture], **config}, "it")]
    expected = [] if window is None else [f"it ignores the sliding window of {window:,} tokens, and transformers applies it"]
    assert texts == expected
    theirs = transformers.AutoConfig.for_model(model_type, **config)
    slides = "sliding_attention" in (getattr(theirs, "layer_types", None) or ["sliding_attention"])
    if architecture != "LlamaForCausalLM":  # which has no windows, whatever config.json says
        assert (theirs.sliding_window if slides else None) == window


def test_a_window_as_long_as_the_longest_text_makes_no_difference() -> None:
    config = {"architectures": ["Phi3ForCausalLM"], "sliding_window": 2047}
    assert window_difference({**config, "max_position_embeddings": 2048}, "it")
    assert not window_difference({**config, "max_position_embeddings": 2047}, "it")
    assert not window_difference({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 512}, "it")
