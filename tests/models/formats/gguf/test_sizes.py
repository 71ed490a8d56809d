"""Sizes of config.json that contradict the tensors: llama.cpp would not load the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests import zoo
from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from weightsmith._base.errors import FormatError, PlanError
from weightsmith._models.formats.gguf.architectures.bert import DistilBert
from weightsmith._models.formats.gguf.architectures.nomic import NomicBert
from weightsmith._models.formats.gguf.architectures.qwen import Qwen3
from weightsmith._models.formats.gguf.base.values import GgufConfig

HEADS = "num_key_value_heads * (hidden_size / num_attention_heads) is 16 in config.json, and blk.0.attn_k.weight"
SPARSE = {"norm_topk_prob": True}
PER_LAYER = {"vocab_size_per_layer_input": 262}


def check(source: Path, changes: dict[str, Any], words: str) -> None:
    """Plan a GGUF file of a model, then of one whose config.json says something else (None: nothing)."""
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    out = source.parent / "q"
    weightsmith.quantize(source, out, "gguf-f32", progress=False)
    config = {**json.loads((source / "config.json").read_text()), **changes}
    stated = {name: value for name, value in config.items() if name not in changes or value is not None}
    (source / "config.json").write_text(json.dumps(stated))
    with pytest.raises(PlanError) as caught:
        weightsmith.quantize(source, out.with_name("r"), "gguf-f32", progress=False)
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "changes", "words"),
    [
        ("mistral", {"head_dim": 24, "sliding_window": None}, {"head_dim": None}, f"{HEADS} would have 48 rows"),
        ("qwen3", {"head_dim": 16}, {"head_dim": 64}, "num_key_value_heads * head_dim is 128"),
        ("llama", {}, {"intermediate_size": 999}, "intermediate_size is 999 in config.json, and blk.0.ffn_down.weight would"),
        ("llama", {}, {"hidden_size": 64}, "hidden_size is 64 in config.json, and token_embd.weight would have 32 columns"),
        ("llama", {}, {"num_key_value_heads": 4}, "num_key_value_heads * head_dim is 32 in config.json"),
        ("phi3-tied", {}, {"num_key_value_heads": 1}, "num_key_value_heads * (hidden_size / num_attention_heads) is 48 in"),
        ("phi3-tied", {}, {"intermediate_size": 999}, "intermediate_size is 999"),
        ("glm4", {}, {"intermediate_size": 999}, "intermediate_size is 999"),
        ("qwen3-moe", SPARSE, {"num_experts": 3, "num_local_experts": None}, "num_experts is 3"),
        ("qwen3-moe", SPARSE, {"moe_intermediate_size": 7}, "experts.0.down_proj.weight: moe_intermediate_size is 7"),
        ("mixtral", {}, {"intermediate_size": 7}, "experts.0.w1.weight: intermediate_size is 7"),
        ("gpt-oss", {}, {"intermediate_size": 7}, "intermediate_size is 7 in config.json, and blk.0.ffn_down_exps.weight"),
        ("deepseek-v3", {}, {"moe_intermediate_size": 7}, "moe_intermediate_size is 7"),
        ("deepseek-v3", {}, {"n_shared_experts": 5}, "n_shared_experts * moe_intermediate_size is 80"),
        ("deepseek-v3", {}, {"q_lora_rank": 7}, "q_lora_rank is 7"),
        ("deepseek-v3", {}, {"kv_lora_rank": 7}, "kv_lora_rank + qk_rope_head_dim is 15"),
        ("qwen3.5", {}, {"num_attention_heads": 8}, "num_attention_heads * head_dim is 128"),
        ("qwen3.5", {}, {"linear_num_value_heads": 8}, "linear_key_head_dim * linear_num_value_heads is"),
        ("gemma4", PER_LAYER, {"per_layer_config": None, "global_head_dim": 64}, "global_head_dim is"),
        ("gemma4", PER_LAYER, {"head_dim": 64}, "in layers without a window) * head_dim is"),
        ("gemma4-moe", {}, {"moe_intermediate_size": 7}, "experts.down_proj: moe_intermediate_size is 7"),
        (
            "lfm2",
            {},
            {"num_key_value_heads": 1},
            "num_key_value_heads (0 in convolutions, which layer_types states) * head_dim is 8",
        ),
        ("ernie4-5-moe", {}, {"moe_num_shared_experts": 5}, "moe_num_shared_experts * moe_intermediate_size is 80"),
    ],
)
def test_a_size_that_contradicts_a_tensor_is_named(
    name: str, sizes: dict[str, Any], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    check(zoo.save(name, tmp_path / "m", 1, vocab_size=262, **sizes), changes, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("qwen2", "qwen2-moe", "nemotron", "starcoder2", "cohere", "cohere2", "olmo2", "olmo3", "olmoe", "lfm2", "phi"),
        "exaone4",
    ],
)
def test_heads_that_llama_cpp_would_not_load(name: str, tmp_path: Path) -> None:
    """It has queries as wide as the model in its code for these."""
    window = {"sliding_window": None} if name == "exaone4" else {}
    source = zoo.save(name, tmp_path / "m", 1, vocab_size=262, head_dim=24, **window)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    with pytest.raises(PlanError, match=r"num_attention_heads \* head_dim is 96, and llama.cpp takes 32 for granted"):
        weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["short_factor", "long_factor"])
def test_phi_has_a_factor_for_each_pair_that_rope_turns(setting: str, tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    source = zoo.save("phi3-tied", tmp_path / "m", 1, vocab_size=262, rope_parameters=rope, original_max_position_embeddings=8)
    changes = {"rope_parameters": {**rope, setting: [1.0] * 3}}
    check(source, changes, f"{setting} has 3 numbers, and RoPE turns 4 pairs of a head")


def test_an_encoder_has_its_own_names_of_sizes() -> None:
    config = GgufConfig({"n_embd": 32})
    assert DistilBert().setting_of("feed_forward_length", config) == "hidden_dim"
    assert [NomicBert().setting_of("embedding_length", stated) for stated in (config, GgufConfig({}))] == [
        "n_embd",
        "hidden_size",
    ]


def test_a_tensor_of_more_dimensions_is_none_of_llama_cpps() -> None:
    shapes = {"token_embd.weight": (262, 64), "blk.0.attn_q.weight": (1, 64, 64)}
    with pytest.raises(
        FormatError, match=r"q_proj.weight: its shape is \[1, 64, 64\], and llama.cpp has 2 dimensions for blk.0"
    ):
        Qwen3().check_sizes(GgufConfig({}), {}, shapes)
    shapes["blk.0.attn_q.weight"] = (64, 64)
    Qwen3().check_sizes(GgufConfig({}), {}, shapes)  # nothing states a size
