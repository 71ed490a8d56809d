"""Tiny transformers models of many architectures, saved as their users save them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.made_once import made_once

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {**SIZES, "head_dim": 8}
ENCODER = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "bos_token_id", "eos_token_id")}
MOE = {**HEADS, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}
GROUPED = {
    **HEADS,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
}
"""Experts with the settings of DeepSeek."""
LFM2 = {**SIZES, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
DELTA_NET = {"head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
INTERLEAVED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
GEMMA4 = {
    **{**HEADS, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "global_head_dim": 16},
    "vocab_size_per_layer_input": 64,
}
GLM_MOE = {**GROUPED, "num_mtp_layers": 0}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "image_size": 16,
    "patch_size": 8,
}
SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
MROPE = {"type": "mrope", "mrope_section": [1, 1, 2]}
QWEN3_ROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
}
QWEN3_VISION = {
    **{"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32},
    **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
}

GRANITE_4 = {
    **SIZES,
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
}
MAMBA, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
GRANITE_SWA = {
    **{**SIZES, "num_hidden_layers": 5, "sliding_window": 8, "layer_rope_theta": [5e3, 5e3, 5e3, 0, 5e3]},
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
    "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING],
}
NEMOTRON_H = {name: value for name, value in HEADS.items() if name != "num_hidden_layers"} | {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 4,
    "n_groups": 2,
}

KIMI_LINEAR = {
    **{
        **SIZES,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "kv_lora_rank": 8,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "layer_types": [MAMBA, MAMBA, FULL, MAMBA]},
}
FALCON = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "intermediate_size")}
FALCON_H1_MULTIPLIERS = {
    **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.25, "key_multiplier": 0.7, "mlp_multipliers": [0.6, 0.3]},
    **{"attention_in_multiplier": 1.5, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.8},
    "ssm_multipliers": [0.4, 0.25, 0.2, 0.5, 0.35],
}
FALCON_H1 = {
    **{**HEADS, "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 4, "mamba_n_groups": 2},
    **FALCON_H1_MULTIPLIERS,
}

# name: model class, config class, arguments
ZOO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "llama-bias": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", SIZES),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SIZES),
    "qwen3.5": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {
            **HEADS,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 0],
            },
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", HEADS),
    "gemma3-text": ("Gemma3ForCausalLM", "Gemma3TextConfig", HEADS),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", {**SIZES, "clip_qkv": 0.25}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", SIZES),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", SIZES),
    "olmoe": (
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**SIZES, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", HEADS),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", SIZES),
    "granite": ("GraniteForCausalLM", "GraniteConfig", SIZES),
    "cohere": ("CohereForCausalLM", "CohereConfig", SIZES),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", SIZES),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", SIZES),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", SIZES),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", HEADS),
    "seed-oss": ("SeedOssForCausalLM", "SeedOssConfig", HEADS),
    "exaone4": (
        "Exaone4ForCausalLM",
        "Exaone4Config",
        {**SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "exaone4-32b": ("Exaone4ForCausalLM", "Exaone4Config", {**SIZES, "num_hidden_layers": 64, "sliding_window": 8}),
    "ernie4-5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", HEADS),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", HEADS),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", HEADS),
    "nemotron-h": ("NemotronHForCausalLM", "NemotronHConfig", {**NEMOTRON_H, "layer_types": [MAMBA, "mlp", FULL, "mlp"]}),
    "nemotron-h-moe": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {**NEMOTRON_H, "layer_types": [MAMBA, "moe", FULL, "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 2.5},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", SIZES),
    "arcee": ("ArceeForCausalLM", "ArceeConfig", HEADS),
    "ministral3": ("Ministral3ForCausalLM", "Ministral3Config", HEADS),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 24}),
    "phi3-tied": ("Phi3ForCausalLM", "Phi3Config", {**SIZES, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SIZES, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        DEEPSEEK,
    ),
    "deepseek-v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"}),
    "glm4-moe-lite": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", {**DEEPSEEK, "n_shared_experts": 1}),
    "granite-moe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {**SIZES, "num_local_experts": 4}),
    "granite-moe-shared": (
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        {**SIZES, "num_local_experts": 4, "shared_intermediate_size": 40},
    ),
    "ernie4-5-moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {**HEADS, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {**LFM2, "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {**LFM2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**MOE, **DELTA_NET, "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "num_hidden_layers": 5},
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {**MOE, **DELTA_NET, "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "num_hidden_layers": 5}
        | {"rope_parameters": INTERLEAVED},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    ),
    "gemma4-moe": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {**HEADS, "num_hidden_layers": 22, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 256, "laurel_rank": 64}
        | {"vocab_size_per_layer_input": 60, "sliding_window": 8, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12},
    ),
    "dots1": (
        "Dots1ForCausalLM",
        "Dots1Config",
        {**GROUPED, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}
        | {"norm_topk_prob": True, "sliding_window": None},
    ),
    "glm4-moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {**GLM_MOE, "routed_scaling_factor": 1.5, "use_qk_norm": True}),
    "glm4-moe-bias": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {**GLM_MOE, "attention_bias": True, "norm_topk_prob": False}),
    "solar-open": (
        "SolarOpenForCausalLM",
        "SolarOpenConfig",
        {**{name: value for name, value in GROUPED.items() if name not in ("intermediate_size", "first_k_dense_replace")}}
        | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
    ),
    "hy-v3": ("HYV3ForCausalLM", "HYV3Config", {**MOE, "num_hidden_layers": 3, "num_experts": 8, "num_shared_experts": 2}),
    "cohere2-moe": (
        "Cohere2MoeForCausalLM",
        "Cohere2MoeConfig",
        {**HEADS, "num_hidden_layers": 5, "sliding_window": 8, "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING]}
        | {"intermediate_size": 16, "prefix_dense_intermediate_size": 48, "mlp_layer_types": ["dense", *["sparse"] * 4]}
        | {"num_experts": 4, "num_shared_experts": 2},
    ),
    "granite-swa": ("GraniteSWAForCausalLM", "GraniteSWAConfig", GRANITE_SWA),
    "granite-moe-swa": (
        "GraniteMoeSWAForCausalLM",
        "GraniteMoeSWAConfig",
        {**GRANITE_SWA, "num_local_experts": 4, "shared_intermediate_size": 40},
    ),
    "laguna": (
        "LagunaForCausalLM",
        "LagunaConfig",
        {**MOE, "num_hidden_layers": 5, "sliding_window": 8, "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING]}
        | {"num_attention_heads_per_layer": [4, 6, 6, 4, 6], "shared_expert_intermediate_size": 24, "num_experts": 8}
        | {"moe_routed_scaling_factor": 2.5},
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        "Mistral4Config",
        {**DEEPSEEK, "num_hidden_layers": 3, "n_routed_experts": 8, "n_group": 2, "qk_nope_head_dim": 16, "v_head_dim": 24}
        | {"routed_scaling_factor": 1.5}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        },
    ),
    "mellum": (
        "MellumForCausalLM",
        "MellumConfig",
        {**MOE, "num_hidden_layers": 5, "sliding_window": 8, "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING]}
        | {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (FULL, SLIDING)}},
    ),
    "minimax-01": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**HEADS, "num_hidden_layers": 8, "num_local_experts": 4, "layer_types": [MAMBA] * 7 + [FULL], "rms_norm_eps": 1e-6}
        | dict.fromkeys(("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor"), 3.5),
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        "AfmoeConfig",
        {**MOE, "num_hidden_layers": 5, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 2.5}
        | {"sliding_window": 8, "mup_enabled": True},
    ),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", {**HEADS, "num_experts": 4, "moe_topk": 2}),
    "glm-dsa": (
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        {**DEEPSEEK, "num_hidden_layers": 3, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "q_lora_rank": 16}
        | {"index_topk": 8, "index_head_dim": 64, "index_n_heads": 32, "indexer_types": ["full", "shared", "full"]},
    ),
    "deepseek-v4": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {name: value for name, value in SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")}
        | {"num_hidden_layers": 4, "moe_intermediate_size": 32, "head_dim": 64, "partial_rotary_factor": 0.25}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 16}
        | {"index_n_heads": 4, "index_head_dim": 64, "sliding_window": 16, "num_nextn_predict_layers": 0}
        | {"layer_types": ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2][:4]}
        | {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
    ),
    "bailing-hybrid": (
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        {name: value for name, value in KIMI_LINEAR.items() if not name.startswith("linear_")}
        | {"head_dim": 16, "layer_types": [MAMBA, FULL] * 2, "layer_group_size": 2, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1, "n_shared_experts": 2, "num_mtp_layers": 0},
    ),
    "hy-v4": (
        "HYV4ForCausalLM",
        "HYV4Config",
        {name: value for name, value in DEEPSEEK.items() if name != "first_k_dense_replace"}
        | {"num_hidden_layers": 3, "n_routed_experts": 8, "n_shared_experts": 1, "q_lora_rank": 16, "qk_nope_head_dim": 16}
        | {"v_head_dim": 24, "index_topk": 8, "index_head_dim": 64, "index_n_heads": 32}
        | {"indexer_types": ["full", "shared", "full"], "routed_scaling_factor": 2.5},
    ),
    "minimax-m3": (
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        {
            **HEADS,
            "num_hidden_layers": 3,
            "intermediate_size": 24,
            "dense_intermediate_size": 40,
            "shared_intermediate_size": 24,
        }
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8}
        | {"index_block_size": 8, "index_topk_blocks": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {"layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse"]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "deepseek-v32": (
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {**DEEPSEEK, "num_hidden_layers": 3, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "q_lora_rank": 16}
        | {"n_routed_experts": 8, "n_group": 2, "index_topk": 8, "index_head_dim": 64, "index_n_heads": 32},
    ),
    "mimo2": (
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        {**HEADS, "num_hidden_layers": 7, "n_routed_experts": 8, "n_group": 2, "num_experts_per_tok": 2, "sliding_window": 8}
        | {"moe_intermediate_size": 16, "head_dim": 16, "v_head_dim": 8}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            }
        },
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        "PhimoeConfig",
        {**SIZES, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}
        | {"original_max_position_embeddings": 32}
        | {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4, "long_factor": [1.5] * 4}
            | {"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 32}
        },
    ),
    "dbrx": (
        "DbrxForCausalLM",
        "DbrxConfig",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 64}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.25, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "exaone-moe": (
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        {**MOE, "num_hidden_layers": 5, "num_shared_experts": 2, "n_group": 2, "topk_group": 1, "sliding_window": 8}
        | {"num_experts": 8, "routed_scaling_factor": 2.5},
    ),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "apertus": ("ApertusForCausalLM", "ApertusConfig", SIZES),
    "kimi-linear": ("KimiLinearForCausalLM", "KimiLinearConfig", KIMI_LINEAR),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON),
    "falcon-11b": (
        "FalconForCausalLM",
        "FalconConfig",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-40b": ("FalconForCausalLM", "FalconConfig", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-h1": ("FalconH1ForCausalLM", "FalconH1Config", FALCON_H1),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4},
    ),
    "falcon-mamba": (
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": 64,
            "state_size": 8,
            "n_groups": 2,
            "num_heads": 4,
            "head_dim": 16,
        },
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **SIZES,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
        },
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**HEADS, "num_hidden_layers": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 64}
        | {"interleave_moe_layer_step": 2},
    ),
    "granite-hybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", GRANITE_4),
    "granite-hybrid-moe": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {**GRANITE_4, "num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_groups": 2, "position_embedding_type": "rope"},
    ),
    "granite-4": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {**GRANITE_4, "layer_types": ["attention", "attention"], "position_embedding_type": "rope"},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "bert-bare": ("BertModel", "BertConfig", ENCODER),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", ENCODER),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 64},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**SPEECH, "max_position_embeddings": 64}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {**SPEECH, "num_mel_bins": 8}),
    "vit": ("ViTForImageClassification", "ViTConfig", {**VISION, "num_labels": 3}),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**ENCODER, "eos_token_id": 2, "bos_token_id": 1}, "vision_config": VISION, "projection_dim": 16},
    ),
    "qwen2-vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {
            "text_config": {**SIZES, "rope_scaling": MROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2, "hidden_size": 32},
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**SIZES, "rope_scaling": MROPE},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "patch_size": 4,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
            },
        },
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {"text_config": {**HEADS, **QWEN3_ROPE}, "vision_config": QWEN3_VISION},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {"text_config": {**MOE, **QWEN3_ROPE, "norm_topk_prob": True}, "vision_config": QWEN3_VISION},
    ),
    "gemma3-vl": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": HEADS, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {**SIZES, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
            "vision_feature_layer": -1,
        },
    ),
}


def save(name: str, folder: Path, seed: int, *, dtype: str = "bfloat16", **changes: Any) -> Path:
    """A model of the zoo with random weights, saved by transformers."""
    model_class, config_class, arguments = ZOO[name]
    return save_as(model_class, config_class, {**arguments, **changes}, folder, seed, dtype=dtype)


def save_as(
    model_class: str, config_class: str, arguments: Mapping[str, Any], folder: Path, seed: int, *, dtype: str = "bfloat16"
) -> Path:
    """A model of any class with random weights: those that transformers starts as 0 or 1 too."""
    import torch
    import transformers

    def make(kept: Path) -> None:
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**arguments))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.1)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                    buffer.copy_(torch.randn_like(buffer) * 0.1)
                if buffer_name.endswith("tid2eid"):  # the experts of each token
                    buffer.copy_(torch.randint(0, arguments["n_routed_experts"], buffer.shape))
        model.to(getattr(torch, dtype)).save_pretrained(kept)

    made_once(folder, __file__, (model_class, config_class, dict(arguments), seed, dtype), make)
    torch.manual_seed(seed)  # what follows draws the same numbers, whether the model was kept or made
    return folder


def published_name_of_hy_v4(name: str) -> str:
    """The published name of a tensor that transformers saves: it undoes its own renaming in another order.

    >>> published_name_of_hy_v4("model.layers.0.hc_pre.hc_mlp_layer.hc_fn")
    'model.layers.0.hc_mlp_layer.hc_pre.hc_fn'
    """
    name = re.sub(r"\.hc_pre\.(hc_attn_layer|hc_mlp_layer)\.", r".\1.hc_pre.", name).replace(".hc_pre.hc_head.", ".hc_head.")
    return re.sub(r"\.mlp\.(shared_experts\.)?linear_gate\.", r".mlp.\1gate_proj.", name)


def published_names_of_ling(names: Iterable[str]) -> dict[str, str]:
    """The published names of tensors that transformers saves: there, only layers that attend have `dense`."""
    names = list(names)
    linear = tuple(name.removesuffix("A_log") for name in names if name.endswith(".A_log"))
    return {name: name.replace(".dense.", ".o_proj.") if name.startswith(linear) else name for name in names}


def load(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """What transformers makes of a folder: the model, and the keys it missed or did not expect."""
    return load_as(ZOO[name][0], folder)


def load_as(model_class: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The same with any class."""
    import transformers

    model, info = getattr(transformers, model_class).from_pretrained(folder, output_loading_info=True)
    return model.eval(), {k: sorted(map(str, v)) for k, v in info.items() if v}
