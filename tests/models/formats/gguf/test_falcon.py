"""Falcon, whose heads of q, k and v are one tensor, and Falcon-H1, whose weights llama.cpp has multiplied by settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files
from weightsmith._base.errors import PlanError
from weightsmith._models.formats.gguf.header import read_gguf_header


def saved(name: str, folder: Path, **changes: Any) -> Path:
    source = zoo.save(name, folder, 1, **{"vocab_size": 262, "dtype": "float32", **changes})
    for file, content in tokenizer_files(BYTE_LEVEL).items():
        (source / file).write_bytes(content)
    return source


def changed(folder: Path, changes: dict[str, Any]) -> Path:
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != ...}))
    return folder


def quantize(source: Path, out: Path, name: str = "f32") -> Path:
    weightsmith.quantize(source, out, f"gguf-{name}", progress=False)
    return out / "model.gguf"


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [{}, {"mamba_rms_norm": True, "mamba_norm_before_gate": False}, {"tie_word_embeddings": True, "lm_head_multiplier": 3.0}],
)
def test_the_multiplied_model_computes_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    import torch

    source = saved("falcon-h1", tmp_path / "m", **changes)
    path = quantize(source, tmp_path / "q")
    with weightsmith.open_checkpoint(path) as opened:
        assert any("multiplied by numbers of the original's config.json" in str(note) for note in opened.notes)
    weightsmith.dequantize(path, tmp_path / "back", out_dtype="float32", progress=False)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["key_multiplier"], config["ssm_multipliers"], config["mlp_multipliers"]) == (1.0, [1.0] * 5, [1.0] * 2)
    (there, missing), (back, also_missing) = (zoo.load("falcon-h1", folder) for folder in (source, tmp_path / "back"))
    assert not any([*missing.values(), *also_missing.values()])
    with torch.inference_mode():
        one, other = (model(torch.arange(40)[None]).logits.numpy() for model in (there, back))
    assert np.abs(one - other).max() < 1e-5 * np.abs(one).max()


def test_the_width_of_mamba_where_config_json_has_null(tmp_path: Path) -> None:
    source = saved("falcon-h1", tmp_path / "m", mamba_d_ssm=None, mamba_d_head=16, mamba_expand=2)
    keys = read_gguf_header(quantize(source, tmp_path / "q")).keys
    assert keys["falcon-h1.ssm.inner_size"] == 64


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mamba_rms_norm": True}, "mamba_norm_before_gate is True, and llama.cpp takes False for granted"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias is False, and llama.cpp takes True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"projectors_bias": True}, "projectors_bias is True"),
        ({"mamba_d_head": 8}, r"mamba_n_heads \* mamba_d_head is 32, and llama.cpp takes 48"),
        ({"time_step_limit": [0.0, 1.0]}, r"time_step_limit is \[0.0, 1.0\]"),
        ({"tie_word_embeddings": True}, "lm_head_multiplier is 0.25, and llama.cpp takes 3.0 for granted"),
        ({"ssm_multipliers": [1.0, 2.0]}, r"ssm_multipliers is \[1.0, 2.0\], not 5 numbers"),
        ({"mlp_multipliers": [0.0, 2.0]}, "mlp_multipliers is 0.0, not a positive number"),
        ({"key_multiplier": "x"}, "key_multiplier is 'x', not a positive number"),
        ({"mamba_d_state": 5}, r"in_proj.weight: 2 \* mamba_d_ssm \+ 2 \* mamba_n_groups \* mamba_d_state"),
        ({"num_attention_heads": 8}, "num_attention_heads"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = changed(saved("falcon-h1", tmp_path / "m"), changes)
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q")


def test_an_adapter_file_does_not_say_what_its_factors_are_multiplied_by(tmp_path: Path) -> None:
    from tests.features.adapters.test_convert import converted, normal, peft_folder

    source = saved("falcon-h1", tmp_path / "m")
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {f"{module}.lora_A.weight": normal(4, 32), f"{module}.lora_B.weight": normal(32, 4)}
    path = converted(peft_folder(tmp_path / "adapter", pair), tmp_path / "out", base=str(source))
    with pytest.raises(weightsmith.WeightsmithError, match="its factors are multiplied by numbers of"):
        weightsmith.plan({"merge_method": "passthrough", "models": [{"model": f"{source}+{path}"}]})


# ---- Falcon


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1}, {"num_kv_heads": ..., "ffn_hidden_size": ...}])
def test_heads_of_falcon_7b_are_shared_whatever_their_number_is(changes: dict[str, Any], tmp_path: Path) -> None:
    source = saved("falcon", tmp_path / "m")
    path = quantize(changed(source, changes), tmp_path / "q")
    keys = read_gguf_header(path).keys
    assert (keys["falcon.attention.head_count_kv"], keys["falcon.feed_forward_length"]) == (1, 128)
    assert keys["falcon.tensor_data_layout"] == "jploski"
    with weightsmith.open_checkpoint(source) as checkpoint:
        name = "transformer.h.0.self_attention.query_key_value.weight"
        assert stored(path)["blk.0.attn_qkv.weight"][2] == checkpoint.read(name).astype("<f4").tobytes()


def test_heads_of_falcon_40b_come_in_llama_cpps_order(tmp_path: Path) -> None:
    source = saved("falcon-40b", tmp_path / "m")
    path = quantize(source, tmp_path / "q")
    with weightsmith.open_checkpoint(source) as checkpoint:
        rows = checkpoint.read("transformer.h.1.self_attention.query_key_value.weight").reshape(2, 4, 8, 32)
    queries, keys, values = rows[:, :2].reshape(32, 32), rows[:, 2].reshape(16, 32), rows[:, 3].reshape(16, 32)
    assert stored(path)["blk.1.attn_qkv.weight"][2] == np.concatenate([queries, keys, values]).astype("<f4").tobytes()
    assert {"blk.0.attn_norm.weight", "blk.0.attn_norm.bias", "blk.0.attn_norm_2.bias"} < stored(path).keys()
    with weightsmith.open_checkpoint(source) as here, weightsmith.open_checkpoint(path) as back:
        assert list(here.specs) == list(back.specs)
        assert all(np.array_equal(here.read(name), back.read(name)) for name in here.specs)
    other = saved("falcon-40b", tmp_path / "other", initializer_range=0.5)
    models = [{"model": str(folder), "parameters": {"weight": 0.5}} for folder in (source, other)]
    with pytest.raises(PlanError, match="has the heads of q, k and v of this tensor in another order"):
        weightsmith.plan({"merge_method": "linear", "models": models}, quantize="gguf-f32")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("falcon", {"alibi": True}, "alibi is True, and llama.cpp takes False for granted"),
        ("falcon", {"bias": True}, "bias is True"),
        ("falcon", {"activation": "relu"}, "activation is 'relu', and llama.cpp takes 'gelu'"),
        ("falcon", {"parallel_attn": False}, "parallel_attn is False, and llama.cpp takes True"),
        ("falcon-40b", {"num_kv_heads": 3}, "num_attention_heads is 4, not a multiple of num_kv_heads, 3"),
        ("falcon-40b", {"num_kv_heads": 4}, "num_kv_heads"),
        ("falcon-40b", {"new_decoder_architecture": False}, "llama.cpp knows no such tensor"),
        ("falcon", {"ffn_hidden_size": 64}, "ffn_hidden_size is 64 in config.json"),
        ("falcon", {"num_ln_in_parallel_attn": "x", "new_decoder_architecture": True}, "the type 'falcon'"),
    ],
)
def test_settings_of_falcon_that_llama_cpp_does_not_have(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = changed(saved(name, tmp_path / "m"), changes)
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q")
