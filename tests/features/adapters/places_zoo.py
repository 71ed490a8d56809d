"""Tiny models of many families, for adapters that PEFT is to load."""

from __future__ import annotations

from typing import Any

from tests import moe_zoo, zoo
from tests.zoo import DEEPSEEK, ENCODER, HEADS, SIZES, SPEECH, VISION

Family = tuple[str, str, dict[str, Any]]

MOE = {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**MOE, "shared_expert_intermediate_size": 24}
SPEECH_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 32,
    "num_feat_extract_layers": 2,
}
PICTURES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3, "image_size": 32, "patch_size": 4}
HYBRID = {**zoo.ZOO["granite-hybrid"][2], "num_local_experts": 4, "num_experts_per_tok": 2}

FAST = ("llama-bias", "mixtral", "deepseek-v3", "gpt-oss", "t5", "mamba")
"""Families that every run of the tests takes: one of each kind of difficulty."""

FAMILIES: dict[str, Family] = {
    **{name: zoo.ZOO[name] for name in ("llama", "llama-bias", "llama-tied", "qwen2", "gpt2", "gpt-neox", "gemma2")},
    **{name: zoo.ZOO[name] for name in ("bert", "bert-bare", "roberta", "modernbert", "t5", "bart", "whisper", "vit", "clip")},
    **{name: zoo.ZOO[name] for name in ("qwen2-vl", "qwen2.5-vl", "gemma3-vl", "llava", "mamba", "granite-hybrid")},
    **moe_zoo.MODELS,
    "deepseek-v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**DEEPSEEK, "n_shared_experts": 1}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**DEEPSEEK, "n_shared_experts": 1}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", SHARED),
    "dbrx": (
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 64},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        },
    ),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "jetmoe": (
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {
            **{key: value for key, value in SIZES.items() if key != "num_attention_heads"},
            **{"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        },
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **SHARED,
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", HYBRID),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {
            **{**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "dots1": (
        "Dots1ForCausalLM",
        "Dots1Config",
        {
            **{**HEADS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        },
    ),
    "flex-olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", {**HEADS, "num_experts": 4, "moe_topk": 2}),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            **{"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8},
            **{"num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2},
        },
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH_ENCODER),
    "hubert": ("HubertModel", "HubertConfig", SPEECH_ENCODER),
    "siglip": (
        "SiglipModel",
        "SiglipConfig",
        {"text_config": {**ENCODER, "bos_token_id": 1, "eos_token_id": 2, "projection_size": 32}, "vision_config": VISION},
    ),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", PICTURES),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", {**SPEECH, "max_position_embeddings": 64}),
    "marian": ("MarianMTModel", "MarianConfig", {**SPEECH, "max_position_embeddings": 64}),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
}


def inputs_of(model: Any) -> dict[str, Any]:
    """Something that the model takes."""
    import torch

    torch.manual_seed(1)
    config, tokens = model.config, torch.arange(3, 15)[None]
    size = getattr(config, "image_size", 16)
    if config.model_type in ("clip", "siglip"):
        return {"input_ids": tokens, "pixel_values": torch.randn(1, 3, 16, 16)}
    main_input = {
        "input_ids": lambda: tokens,
        "input_features": lambda: torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions),
        "input_values": lambda: torch.randn(1, 4000),
        "pixel_values": lambda: torch.randn(1, 3, size, size),
    }[model.main_input_name]()
    inputs = {model.main_input_name: main_input}
    return inputs | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})


def outputs_of(model: Any, inputs: dict[str, Any]) -> list[Any]:
    """All tensors of floating numbers that it returns."""
    import torch

    with torch.no_grad():
        return [value for value in model(**inputs).values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
