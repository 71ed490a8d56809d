"""Ling 3: published names and settings, limits of gates, and what llama.cpp computes of layers of both kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files, write_gguf
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from weightsmith._base.errors import FormatError, PlanError, Unsupported
from weightsmith._models.formats.gguf.architectures import architecture_of_config, text_config
from weightsmith._models.formats.gguf.header import read_gguf_header

MAMBA, FULL = "linear_attention", "full_attention"
ALIASES = {
    **{"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group"},
    "num_experts_per_token": "num_experts_per_tok",
}
"""transformers 5 saves the first names, and published files have the second ones."""
SAVED_ONLY = ("layer_types", "mlp_layer_types", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads")
PUBLISHED = {
    **{"no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise", "score_function": "sigmoid", "head_dim": 16},
    **{"moe_shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.5, "use_qk_norm": True, "rope_scaling": None},
}


def saved(folder: Path, **changes: Any) -> Path:
    source = zoo.save("bailing-hybrid", folder, 1, **{"vocab_size": 262, "dtype": "float32", **changes})
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    return source


def published(source: Path, **changes: Any) -> Path:
    config = json.loads((source / "config.json").read_text())
    config = {ALIASES.get(name, name): value for name, value in config.items() if name not in SAVED_ONLY}
    with weightsmith.open_checkpoint(source) as checkpoint:
        names = zoo.published_names_of_ling(checkpoint.specs)
        tensors = {names[name]: checkpoint.read(name) for name in checkpoint.specs}
    return write_checkpoint(source, tensors, {**config, **PUBLISHED, **changes})


def written(source: Path) -> Path:
    out = source.with_name(f"{source.name}-q")
    weightsmith.quantize(source, out, "gguf-f32", progress=False, overwrite=True)
    return out / "model.gguf"


def keys_of(path: Path) -> dict[str, str]:
    return {name: str(value) for name, value in read_gguf_header(path).keys.items() if name.startswith("bailingmoe3.")}


@pytest.mark.long
def test_both_layouts_give_one_file_and_come_back(tmp_path: Path) -> None:
    plain = written(saved(tmp_path / "plain"))
    source = published(saved(tmp_path / "m"))
    path = written(source)
    assert stored(path) == stored(plain)
    assert keys_of(path) == keys_of(plain)
    tensors = stored(path)
    assert tensors["blk.0.ssm_a"][1] == (4, 1)
    assert tensors["blk.0.ssm_conv1d_q.weight"][1] == (1, 64, 1, 4)
    assert tensors["blk.0.ssm_g_a.weight"][1] == (64, 32)
    assert tensors["blk.1.attn_gate.weight"][1] == (4, 32)
    with weightsmith.open_checkpoint(source) as here, weightsmith.open_checkpoint(path) as back:
        assert sorted(back.specs) == sorted(here.specs)
        for name in here.specs:
            exact = 1e-6 if name.endswith("A_log") else 0
            assert np.allclose(back.read(name), here.read(name), rtol=0, atol=exact), name
        decay = here.read("model.layers.0.attention.A_log")
        import transformers

        theirs, ours = (transformers.AutoConfig.from_pretrained(folder.folder).to_dict() for folder in (here, back))
    assert np.allclose(np.frombuffer(tensors["blk.0.ssm_a"][2], "<f4"), np.exp(decay), rtol=1e-6)
    unlike = ("architectures", "dtype", "transformers_version", "_name_or_path", "eos_token_id", "bos_token_id", "pad_token_id")
    unlike += ("partial_rotary_factor", "use_qk_norm", "rope_scaling", "rope_parameters")
    for key, value in theirs.items():
        assert key in unlike or ours.get(key) == value, key
    assert ours["rope_parameters"] == {"rope_type": "default", "rope_theta": 6e6}
    again = weightsmith.dequantize(path, tmp_path / "back", out_dtype="float32", progress=False)
    _, missing = zoo.load("bailing-hybrid", Path(again.out))
    assert not any(missing.values())


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.reader
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": 12, "kda_lower_bound": -2.0},
        {"layer_types": [FULL, MAMBA, MAMBA, FULL], "first_k_dense_replace": 2, "norm_topk_prob": False},
    ],
)
def test_llama_cpp_computes_what_transformers_does(changes: dict[str, Any], tmp_path: Path) -> None:
    import torch

    source = saved(tmp_path / "m", **changes)
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors, config = {name: checkpoint.read(name) for name in checkpoint.specs}, checkpoint.config
    larger = {name: values * np.float32(3 if values.ndim == 2 else 1) for name, values in tensors.items()}
    path, tokens = written(write_checkpoint(source, larger, config)), np.random.default_rng(0).integers(0, 256, 40).tolist()
    model, missing = zoo.load("bailing-hybrid", source)
    assert not any(missing.values())
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(path) as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 2e-3 * np.abs(theirs).max()


@needs_llama_cpp
@pytest.mark.long
def test_limits_of_gates_are_those_of_llama_cpps_converter(tmp_path: Path) -> None:
    limits = {"expert_swiglu_limit_list": [None, 0, 0.5], "share_expert_swiglu_limit_list": [0, 0, 0, 2**-10, 7]}
    path = written(published(saved(tmp_path / "m"), **limits))
    keys = read_gguf_header(path).keys
    assert keys["bailingmoe3.swiglu_clamp_exp"].tolist() == [0, 0, 0.5, 0]
    assert keys["bailingmoe3.swiglu_clamp_shexp"].tolist() == [0, 0, 0, 2**-10]
    with weightsmith.open_checkpoint(path) as back:
        assert back.config is not None
        assert back.config["expert_swiglu_limit_list"] == [0.0, 0.0, 0.5, 0.0]
        assert back.config["share_expert_swiglu_limit_list"] == [0.0, 0.0, 0.0, 2**-10]
    plain = written(published(saved(tmp_path / "plain")))
    logits = []
    for file in (path, plain):
        with llama_cpp.Judge(file) as judge:
            logits.append(judge.logits(list(range(10))))
    assert not np.array_equal(*logits)


def test_weights_are_named_by_the_kind_of_their_layer(tmp_path: Path) -> None:
    config = json.loads((saved(tmp_path / "m") / "config.json").read_text())
    architecture = architecture_of_config(text_config(config))
    names = [architecture.place(f"model.layers.{i}.attention.g_proj.weight") for i in range(2)]
    assert [place.name for place in names if place] == ["blk.0.ssm_g_a.weight", "blk.1.attn_gate.weight"]
    assert architecture.hub_name("blk.0.attn_output.weight") == "model.layers.0.attention.o_proj.weight"
    assert architecture.hub_name("blk.1.attn_output.weight") == "model.layers.1.attention.dense.weight"


def test_layers_behind_the_last_group_attend(tmp_path: Path) -> None:
    """As in published code and llama.cpp's converter, where config.json does not list the layers."""
    kinds = [MAMBA, MAMBA, FULL, FULL]
    source = published(saved(tmp_path / "m", layer_types=kinds), layer_group_size=3)
    assert read_gguf_header(written(source)).keys["bailingmoe3.attention.head_count_kv"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("kind", "words"), [(MAMBA, "no layer has attention"), (FULL, "all layers have attention")])
def test_models_of_one_kind_of_layers(kind: str, words: str, tmp_path: Path) -> None:
    """llama.cpp ends with an error."""
    with pytest.raises(PlanError, match=words):
        written(saved(tmp_path / "m", layer_types=[kind] * 4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kda_safe_gate": False}, "kda_safe_gate is False, and llama.cpp takes True for granted"),
        ({"no_kda_lora": False}, "no_kda_lora is False, and llama.cpp takes True for granted"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "gated_attention_proj_granularity_type is 'element_wise'"),
        ({"score_function": "softmax"}, "score_function is 'softmax', and llama.cpp takes 'sigmoid' for granted"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, and llama.cpp takes 4"),
        ({"kda_lower_bound": 1.0}, "kda_lower_bound is 1.0, not a number below 0"),
        ({"kda_lower_bound": True}, "kda_lower_bound is True, not a number below 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_type is 'yarn', and llama.cpp"),
        ({"layer_types": [FULL] * 3}, "layer_types is .*, not full_attention or linear_attention for each of 4 layers"),
        ({"layer_types": [FULL, MAMBA] * 2}, "layer 0 has full_attention, unlike its tensors"),
        ({"layer_types": None, "layer_group_size": 0}, "layer_group_size is 0, not a whole number from 1 to 4"),
        ({"layer_types": None, "layer_group_size": 4}, "layer 1 has linear_attention, unlike its tensors"),
        ({"mlp_layer_types": ["sparse"] * 4}, "first_k_dense_replace is 0, and layer 0 has no experts"),
        ({"linear_head_dim": 8}, "head_dim is 32 in config.json"),
        ({"kv_lora_rank": 7}, r"kv_lora_rank \+ qk_rope_head_dim is 15"),
        ({"num_shared_experts": 1}, "expert_shared_feed_forward_length|moe_intermediate_size is 16 in config.json"),
        ({"expert_swiglu_limit_list": [-1.0]}, "expert_swiglu_limit_list is -1.0, not a positive number"),
        ({"share_expert_swiglu_limit_list": 7}, "share_expert_swiglu_limit_list is 7, not a list of numbers from 0 on"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=words):
        written(source)


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("kda.safe_gate", False, Unsupported, "kda.safe_gate is false"),
        ("kda.gate_lower_bound", 1.0, FormatError, r"kda\.gate_lower_bound is 1.0, not a number below 0"),
        (
            "attention.head_count_kv",
            [1, 1],
            FormatError,
            r"attention\.head_count_kv is .*, not a whole number for each of 4 layers",
        ),
        ("swiglu_clamp_exp", [0.5], FormatError, r"swiglu_clamp_exp is .*, not a number for each of 4 layers"),
    ],
)
def test_keys_that_config_json_cannot_say(key: str, value: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    path = written(saved(tmp_path / "m"))
    start = "bailingmoe3."
    keys = {
        name.removeprefix(start): other.tolist() if isinstance(other, np.ndarray) else other
        for name, other in read_gguf_header(path).keys.items()
        if name.startswith(start) or name.startswith("tokenizer.")
    }
    tensors = {name: (np.frombuffer(data, "<f4").reshape(shape), "F32") for name, (_, shape, data) in stored(path).items()}
    changed = write_gguf(tmp_path / "changed.gguf", "bailingmoe3", tensors, {**keys, key: value})
    with pytest.raises(error, match=words):
        weightsmith.open_checkpoint(changed)
