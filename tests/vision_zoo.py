"""Tiny models for images, under the names that published ones have; their numbers depend on nothing but the names."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from tests.mini import write_checkpoint
from weightsmith._base.tensors import DTYPES

WIDTH, INNER, HEADS, TOKENS, LAYERS = 32, 48, 4, 262, 4
BF16 = DTYPES["BF16"].numpy
Shapes = dict[str, tuple[int, ...]]
Model = tuple[Shapes, dict[str, Any], dict[str, Any]]
"""Shapes of tensors, config.json, preprocessor_config.json."""

TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": TOKENS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "image_size": 32,
    "patch_size": 8,
}
PROCESSOR = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.5, 0.75]}
TOKENIZER = {**BYTE_LEVEL, "tokenizer.ggml.tokens": [*BYTE_LEVEL["tokenizer.ggml.tokens"][:-1], "[IMG_BREAK]"]}


def text(prefix: str, *, norms: tuple[str, ...] = (), bias: bool = False) -> Shapes:
    """The language model: one layer, a tied head."""
    layer = f"{prefix}layers.0."
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (TOKENS, WIDTH), f"{prefix}norm.weight": (WIDTH,)}
    shapes |= {f"{layer}{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm", *norms)}
    shapes |= {f"{layer}self_attn.{letter}_proj.weight": (WIDTH, WIDTH) for letter in "qo"}
    shapes |= {f"{layer}self_attn.{letter}_proj.weight": (WIDTH // 2, WIDTH) for letter in "kv"}
    shapes |= {
        f"{layer}self_attn.{letter}_proj.bias": (WIDTH // (1 if letter == "q" else 2),) for letter in ("qkv" if bias else "")
    }
    shapes |= {f"{layer}mlp.{part}_proj.weight": (INNER, WIDTH) for part in ("gate", "up")}
    return shapes | {f"{layer}mlp.down_proj.weight": (WIDTH, INNER)}


def module(name: str, *shape: int, bias: bool = True) -> Shapes:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def siglip(prefix: str) -> Shapes:
    """A tower of SigLIP."""
    shapes = module(f"{prefix}embeddings.patch_embedding", WIDTH, 3, 8, 8) | module(f"{prefix}post_layernorm", WIDTH)
    shapes |= module(f"{prefix}embeddings.position_embedding", 16, WIDTH, bias=False)
    for i in range(LAYERS):
        layer = f"{prefix}encoder.layers.{i}."
        shapes |= module(f"{layer}layer_norm1", WIDTH) | module(f"{layer}layer_norm2", WIDTH)
        shapes |= module(f"{layer}mlp.fc1", INNER, WIDTH) | module(f"{layer}mlp.fc2", WIDTH, INNER)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= module(f"{layer}self_attn.{part}", WIDTH, WIDTH)
    return shapes


def gemma3() -> Model:
    shapes = text("language_model.model.", norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"))
    shapes |= {f"language_model.model.layers.0.self_attn.{letter}_norm.weight": (8,) for letter in "qk"}
    shapes |= siglip("vision_tower.vision_model.") | {"multi_modal_projector.mm_input_projection_weight": (WIDTH, WIDTH)}
    shapes |= {"multi_modal_projector.mm_soft_emb_norm.weight": (WIDTH,)}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "text_config": {**TEXT, "model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 16},
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
    }
    return shapes, config, {**PROCESSOR, "image_seq_length": 4}


def pixtral_tower() -> Shapes:
    shapes = module("vision_tower.patch_conv", WIDTH, 3, 8, 8, bias=False) | module("vision_tower.ln_pre", WIDTH, bias=False)
    for i in range(LAYERS):
        layer = f"vision_tower.transformer.layers.{i}."
        for letter in "qkvo":
            shapes |= module(f"{layer}attention.{letter}_proj", WIDTH, WIDTH, bias=False)
        for part in ("gate_proj", "up_proj"):
            shapes |= module(f"{layer}feed_forward.{part}", INNER, WIDTH, bias=False)
        shapes |= module(f"{layer}feed_forward.down_proj", WIDTH, INNER, bias=False)
        for part in ("attention_norm", "ffn_norm"):
            shapes |= module(f"{layer}{part}", WIDTH, bias=False)
    return shapes


PIXTRAL = {**VISION, "model_type": "pixtral", "head_dim": 8}


def pixtral() -> Model:
    shapes = text("language_model.model.") | pixtral_tower()
    for i in (1, 2):
        shapes |= module(f"multi_modal_projector.linear_{i}", WIDTH, WIDTH)
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 10,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**PIXTRAL, "hidden_act": "silu"},
    }
    return shapes, config, PROCESSOR


def mistral3() -> Model:
    shapes = text("language_model.model.") | pixtral_tower() | module("multi_modal_projector.norm", WIDTH, bias=False)
    shapes |= module("multi_modal_projector.patch_merger.merging_layer", WIDTH, 4 * WIDTH, bias=False)
    for i in (1, 2):
        shapes |= module(f"multi_modal_projector.linear_{i}", WIDTH, WIDTH, bias=False)
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**PIXTRAL, "hidden_act": "gelu"},
    }
    return shapes, config, PROCESSOR


def internvl() -> Model:
    shapes = text("language_model.model.", bias=True)
    tower = "vision_tower.embeddings."
    shapes |= {f"{tower}cls_token": (1, 1, WIDTH), f"{tower}position_embeddings": (1, 17, WIDTH)}
    shapes |= module(f"{tower}patch_embeddings.projection", WIDTH, 3, 8, 8)
    for i in range(LAYERS):
        layer = f"vision_tower.encoder.layer.{i}."
        shapes |= {f"{layer}lambda_{number}": (WIDTH,) for number in (1, 2)}
        shapes |= module(f"{layer}layernorm_before", WIDTH) | module(f"{layer}layernorm_after", WIDTH)
        for letter in "qkv":
            shapes |= module(f"{layer}attention.{letter}_proj", WIDTH, WIDTH, bias=False)
        shapes |= module(f"{layer}attention.projection_layer", WIDTH, WIDTH)
        shapes |= module(f"{layer}mlp.fc1", INNER, WIDTH) | module(f"{layer}mlp.fc2", WIDTH, INNER)
    shapes |= module("multi_modal_projector.layer_norm", 4 * WIDTH)
    shapes |= module("multi_modal_projector.linear_1", WIDTH, 4 * WIDTH) | module(
        "multi_modal_projector.linear_2", WIDTH, WIDTH
    )
    config = {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "image_token_id": 10,
        "downsample_ratio": 0.5,
        "vision_feature_layer": -1,
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**VISION, "architectures": ["InternVisionModel"], "model_type": "internvl_vision"}
        | {"image_size": [32, 32], "patch_size": [8, 8], "hidden_act": "gelu"},
    }
    return shapes, config, PROCESSOR


def idefics3(name: str = "idefics3", architecture: str = "Idefics3ForConditionalGeneration") -> Model:
    shapes = text("model.text_model.") | siglip("model.vision_model.") | {"lm_head.weight": (TOKENS, WIDTH)}
    shapes |= {"model.connector.modality_projection.proj.weight": (WIDTH, 4 * WIDTH)}
    config = {
        "architectures": [architecture],
        "model_type": name,
        "image_token_id": 10,
        "scale_factor": 2,
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": f"{name}_vision"},
    }
    return shapes, config, {**PROCESSOR, "size": {"longest_edge": 64}}


def smolvlm() -> Model:
    return idefics3("smolvlm", "SmolVLMForConditionalGeneration")


def qwen2_vl() -> Model:
    """The layout of the first release: text settings are at the top level of config.json, beside vision_config."""
    shapes = text("model.", bias=True) | qwen_tower(bias=True)
    for i in range(LAYERS):
        shapes |= module(f"visual.blocks.{i}.mlp.fc1", 4 * WIDTH, WIDTH) | module(
            f"visual.blocks.{i}.mlp.fc2", WIDTH, 4 * WIDTH
        )
    config = {
        **QWEN,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_config": {"depth": LAYERS, "embed_dim": WIDTH, "num_heads": HEADS, "patch_size": 8, "hidden_size": WIDTH},
    }
    return shapes, config, PROCESSOR


def qwen2_5_vl() -> Model:
    shapes = text("model.", bias=True) | qwen_tower(bias=False)
    for i in range(LAYERS):
        block = f"visual.blocks.{i}.mlp."
        shapes |= module(f"{block}gate_proj", INNER, WIDTH) | module(f"{block}up_proj", INNER, WIDTH)
        shapes |= module(f"{block}down_proj", WIDTH, INNER)
    vision = {"depth": LAYERS, "hidden_size": WIDTH, "intermediate_size": INNER, "num_heads": HEADS, "patch_size": 8}
    config = {
        **QWEN,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_config": {**vision, "out_hidden_size": WIDTH, "fullatt_block_indexes": [1, 3], "hidden_act": "silu"},
    }
    return shapes, config, PROCESSOR


QWEN = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "tie_word_embeddings": True}


def qwen_tower(*, bias: bool) -> Shapes:
    shapes: Shapes = {"visual.patch_embed.proj.weight": (WIDTH, 3, 2, 8, 8)} | module("visual.merger.ln_q", WIDTH, bias=bias)
    shapes |= module("visual.merger.mlp.0", 4 * WIDTH, 4 * WIDTH) | module("visual.merger.mlp.2", WIDTH, 4 * WIDTH)
    for i in range(LAYERS):
        block = f"visual.blocks.{i}."
        shapes |= module(f"{block}norm1", WIDTH, bias=bias) | module(f"{block}norm2", WIDTH, bias=bias)
        shapes |= module(f"{block}attn.qkv", 3 * WIDTH, WIDTH) | module(f"{block}attn.proj", WIDTH, WIDTH)
    return shapes


def qwen3_tower(mergers: int) -> Shapes:
    """The tower of Qwen3-VL and Qwen3.5. mergers: of layers whose output the language model gets, too."""
    shapes = {
        f"model.visual.patch_embed.proj.{kind}": (WIDTH, 3, 2, 8, 8)[:dims] for kind, dims in (("weight", 5), ("bias", 1))
    }
    shapes |= module("model.visual.pos_embed", 16, WIDTH, bias=False) | module("model.visual.merger.norm", WIDTH)
    for merger in ("merger", *(f"deepstack_merger_list.{i}" for i in range(mergers))):
        shapes |= module(f"model.visual.{merger}.linear_fc1", 4 * WIDTH, 4 * WIDTH)
        shapes |= module(f"model.visual.{merger}.linear_fc2", WIDTH, 4 * WIDTH)
    for i in range(mergers):
        shapes |= module(f"model.visual.deepstack_merger_list.{i}.norm", 4 * WIDTH)
    for i in range(LAYERS):
        block = f"model.visual.blocks.{i}."
        shapes |= module(f"{block}norm1", WIDTH) | module(f"{block}norm2", WIDTH)
        shapes |= module(f"{block}attn.qkv", 3 * WIDTH, WIDTH) | module(f"{block}attn.proj", WIDTH, WIDTH)
        shapes |= module(f"{block}mlp.linear_fc1", INNER, WIDTH) | module(f"{block}mlp.linear_fc2", WIDTH, INNER)
    return shapes


QWEN3_VISION = {
    **{"depth": LAYERS, "hidden_size": WIDTH, "intermediate_size": INNER, "num_heads": HEADS, "patch_size": 8},
    **{"out_hidden_size": WIDTH, "num_position_embeddings": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "hidden_act": "gelu_pytorch_tanh",
}
QWEN3_TEXT = {**TEXT, "rms_norm_eps": 1e-6, "num_hidden_layers": 3, "tie_word_embeddings": True}


def qwen3_text() -> Shapes:
    """A language model of as many layers as the vision half has mergers, and one more."""
    layer = text("model.language_model.")
    layer |= {f"model.language_model.layers.0.self_attn.{letter}_norm.weight": (8,) for letter in "qk"}
    return {name.replace(".0.", f".{i}."): shape for i in range(3) for name, shape in layer.items()}


def qwen3_vl() -> Model:
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 10,
        "tie_word_embeddings": True,
        "text_config": {**QWEN3_TEXT, "model_type": "qwen3_vl_text", "rope_scaling": rope},
        "vision_config": {**QWEN3_VISION, "model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 2]},
    }
    return qwen3_text() | qwen3_tower(2), config, PROCESSOR


def qwen3_5() -> Model:
    gated = {name: (2 * WIDTH, WIDTH) for name in qwen3_text() if name.endswith("q_proj.weight")}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": 10,
        "tie_word_embeddings": True,
        "text_config": {
            **{**QWEN3_TEXT, "model_type": "qwen3_5_text", "rope_parameters": {**rope, "partial_rotary_factor": 1.0}},
            **{"full_attention_interval": 1, "layer_types": ["full_attention"] * 3},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
        },
        "vision_config": {**QWEN3_VISION, "model_type": "qwen3_5", "deepstack_visual_indexes": []},
    }
    return qwen3_text() | gated | qwen3_tower(0), config, PROCESSOR


MODELS: dict[str, Callable[[], Model]] = {
    "gemma3": gemma3,
    "pixtral": pixtral,
    "mistral3": mistral3,
    "internvl": internvl,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "qwen2-vl": qwen2_vl,
    "qwen2.5-vl": qwen2_5_vl,
    "qwen3-vl": qwen3_vl,
    "qwen3.5": qwen3_5,
}


def tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Numbers from -1/4 to 1/4."""
    start = zlib.crc32(f"{seed} {name}".encode())
    raw = (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(start)) * np.uint64(2654435761)
    return ((raw % np.uint64(8192)).astype(np.float32) / 16384 - 0.25).reshape(shape).astype(BF16)


def save(name: str, folder: Path, seed: int = 0, *, rename: Mapping[str, str] | None = None, **changes: Any) -> Path:
    """A model of `MODELS`, with its tokenizer and processor. changes: of its config.json."""
    shapes, config, processor = MODELS[name]()
    tensors = {spec: tensor(spec, shape, seed) for spec, shape in shapes.items()}
    for here, there in (rename or {}).items():
        tensors = {spec.replace(here, there, 1): values for spec, values in tensors.items()}
    write_checkpoint(folder, tensors, {**config, **changes})
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    for file, data in tokenizer_files(TOKENIZER).items():
        (folder / file).write_bytes(data)
    return folder


def save_for_converter(name: str, folder: Path) -> Path:
    """The same under names that llama.cpp's converter looks for."""
    return save(name, folder, rename=CONVERTER.get(name))


NEWER = {
    name: {
        "vision_tower.vision_model." if name == "gemma3" else "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "language_model.model.": "model.language_model.",
    }
    for name in ("gemma3", "pixtral", "mistral3", "internvl")
} | {name: {"model.": "model.language_model.", "visual.": "model.visual."} for name in ("qwen2-vl", "qwen2.5-vl")}
"""Beginnings of names: those of the files above → those of transformers 5."""

CONVERTER = {
    "pixtral": {"language_model.model.": "model."},
    "mistral3": {"language_model.model.": "model."},
    "internvl": {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
}
"""The same → those that the converter knows: it does not find the row of [IMG_BREAK] under `language_model.`."""
