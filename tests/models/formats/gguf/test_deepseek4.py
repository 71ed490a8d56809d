"""DeepSeek-V4: published files, layers of each kind, the table of experts, and settings that llama.cpp does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from weightsmith._base.errors import PlanError
from weightsmith._models.formats.gguf.header import read_gguf_header

YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
SETTINGS = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")


def saved(folder: Path, **changes: Any) -> Path:
    source = zoo.save("deepseek-v4", folder, 1, vocab_size=262, max_position_embeddings=512, dtype="float32")
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
    return source


def written(source: Path) -> Path:
    weightsmith.quantize(source, source.parent / "q", "gguf-f32", progress=False)
    return source.parent / "q" / "model.gguf"


def published(source: Path) -> Path:
    """As DeepSeek publishes it; transformers saves some tensors under other names."""
    config = json.loads((source / "config.json").read_text())
    for name in SETTINGS:
        del config[name]
    config |= {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1, "qk_rope_head_dim": 16, "rope_scaling": YARN}
    with weightsmith.open_checkpoint(source) as checkpoint:
        tensors = {hub_name(name): checkpoint.read(name) for name in checkpoint.specs}
    return write_checkpoint(source, tensors, config | {"num_nextn_predict_layers": 1})


def hub_name(name: str) -> str:
    name = name.replace("model.hc_head.hc_", "hc_head_").replace(".attn.norm.weight", ".attn.kv_norm.weight")
    return name.replace("model.embed_tokens.", "embed.").removeprefix("model.")


def keys_of(path: Path) -> dict[str, str]:
    return {name: str(value) for name, value in read_gguf_header(path).keys.items() if name.startswith("deepseek4.")}


@pytest.mark.long
def test_both_layouts_give_one_file_and_come_back(tmp_path: Path) -> None:
    compressed = {"rope_type": "yarn", "rope_theta": 160000.0, "partial_rotary_factor": 0.25, "attention_factor": 1.0}
    compressed |= {name: value for name, value in YARN.items() if name != "type"}
    main = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    plain = written(saved(tmp_path / "plain" / "m", rope_parameters={"main": main, "compress": compressed}))
    source = published(saved(tmp_path / "m"))
    path = written(source)
    assert stored(path) == stored(plain)
    assert keys_of(path) == keys_of(plain)
    assert keys_of(path)["deepseek4.attention.compress_ratios"] == "[  0   4 128   4]"
    with weightsmith.open_checkpoint(source) as here, weightsmith.open_checkpoint(path) as back:
        assert sorted(back.specs) == sorted(here.specs)
        for name, spec in here.specs.items():
            assert np.array_equal(back.read(name).astype(spec.dtype.numpy), here.read(name)), name
        import transformers

        configs = [transformers.AutoConfig.from_pretrained(folder.folder).to_dict() for folder in (here, back)]
        unlike = ("architectures", "dtype", "transformers_version", "_name_or_path", "num_nextn_predict_layers")
        for key, value in configs[0].items():
            if key == "rope_parameters":
                value["compress"].pop("type", None)
                configs[1][key]["compress"].setdefault("attention_factor", 1.0)
            assert key in unlike or configs[1].get(key) == value, key
        weightsmith.dequantize(path, tmp_path / "back", progress=False)
    _, missing = zoo.load("deepseek-v4", tmp_path / "back")
    assert not any(missing.values())


@pytest.mark.long
@pytest.mark.parametrize("name", ["f16", "q8_0", "q4_0"])
def test_the_table_of_experts_is_of_whole_numbers(name: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    weightsmith.quantize(source, tmp_path / "q", f"gguf-{name}", progress=False)
    kind, shape, data = stored(tmp_path / "q" / "model.gguf")["blk.0.ffn_gate_tid2eid.weight"]
    with weightsmith.open_checkpoint(source) as checkpoint:
        table = checkpoint.read("model.layers.0.ffn.gate.tid2eid")
    assert (kind, shape) == ("I32", table.shape)
    kinds = {tensor: kind for tensor, (kind, _, _) in stored(tmp_path / "q" / "model.gguf").items()}
    if name == "f16":  # those that are published as F32
        for part in ("blk.0.hc_attn_fn", "blk.1.attn_compressor_ape", "blk.1.indexer.proj", "output_hc_fn"):
            assert kinds[f"{part}.weight"] == "F32"
        assert kinds["blk.0.attn_q_a.weight"] == "F16"
    assert table.any()
    assert np.array_equal(np.frombuffer(data, "<i4").reshape(shape), table)


@needs_llama_cpp
@pytest.mark.long
def test_llama_cpp_computes_the_same_of_a_text_that_all_kinds_of_layers_compress(tmp_path: Path) -> None:
    import torch

    source = published(saved(tmp_path / "m"))
    path = written(source)
    model, missing = zoo.load("deepseek-v4", source)
    assert not any(missing.values())
    tokens = np.random.default_rng(0).integers(0, 256, 300).tolist()
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(path) as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', and llama.cpp takes 'sqrtsoftplus' for granted"),
        ({"hc_mult": 2}, "hc_mult is 2, and llama.cpp takes 4 for granted"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and llama.cpp takes False for granted"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and llama.cpp takes 'silu' for granted"),
        ({"compress_rates": {"compressed_sparse_attention": 8}}, r"compress_rates is \{.*, and llama.cpp takes"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is .*, not one of .* for each of 4 layers"),
        ({"layer_types": "absent", "compress_ratios": [0, 4, 64, 4]}, "layer_types is .*, not one of"),
        ({"layer_types": ["sliding_attention"] * 4}, "by layer_types, layer 1 has sliding_attention, unlike its tensors"),
        ({"layer_types": "absent"}, "by layer_types, layer 0 has heavily_compressed_attention, unlike its tensors"),
        ({"mlp_layer_types": ["moe", "hash_moe"] * 2}, "mlp_layer_types is .*, and llama.cpp takes"),
        ({"mlp_layer_types": "absent"}, "by mlp_layer_types, layer 1 is hash_moe, unlike its tensors"),
        (
            {"rope_parameters": "absent", "rope_scaling": {**YARN, "attention_factor": 1.2}},
            "attention_factor is 1.2, and llama.cpp takes 1 for granted",
        ),
        (
            {"rope_parameters": {"main": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, "compress": {}}},
            "rope_type of main is 'linear', and llama.cpp takes 'default' for granted",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.25, and llama.cpp takes 0.5 for granted"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        written(saved(tmp_path / "m", **changes))
