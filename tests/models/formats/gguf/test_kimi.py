"""Kimi Linear: two layouts of config.json and names, and what llama.cpp computes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from weightsmith._base.errors import PlanError
from weightsmith._models.formats.gguf.header import read_gguf_header

RENAMED = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def saved(folder: Path, **changes: Any) -> Path:
    source = zoo.save("kimi-linear", folder, 1, **{"vocab_size": 262, "dtype": "float32", **changes})
    for file, content in tokenizer_files(BYTE_LEVEL).items():
        (source / file).write_bytes(content)
    return source


def published(folder: Path) -> Path:
    """As Moonshot publishes its models."""
    config = json.loads((folder / "config.json").read_text())
    kinds = config.pop("layer_types")
    linear: dict[str, Any] = {"full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"]}
    linear["kda_layers"] = [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"]
    linear |= {theirs: config.pop(ours) for ours, theirs in RENAMED.items()}
    dense = config.pop("mlp_layer_types").count("dense")
    config |= {"linear_attn_config": linear, "first_k_dense_replace": dense, "moe_layer_freq": 1, "use_grouped_topk": True}
    config |= {"moe_router_activation_func": "sigmoid", "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None}
    with weightsmith.open_checkpoint(folder) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.specs}
    starts = tuple(f"model.layers.{i}." for i in range(dense))
    plain = {
        name.replace(".block_sparse_moe.", ".mlp.") if name.startswith(starts) else name: values
        for name, values in tensors.items()
    }
    assert plain.keys() != tensors.keys()
    return write_checkpoint(folder, plain, config)


def quantize(source: Path, out: Path, name: str = "f32") -> Path:
    weightsmith.quantize(source, out, f"gguf-{name}", progress=False)
    return out / "model.gguf"


@pytest.mark.long
def test_both_layouts_give_one_file_and_come_back(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", dtype="bfloat16")
    path = quantize(source, tmp_path / "q")
    kimi_keys = {name: str(value) for name, value in read_gguf_header(path).keys.items() if name.startswith("kimi-linear.")}
    published(source)
    again = quantize(source, tmp_path / "again")
    assert stored(again) == stored(path)
    assert kimi_keys == {
        name: str(value) for name, value in read_gguf_header(again).keys.items() if name.startswith("kimi-linear.")
    }
    assert stored(path)["blk.0.ssm_conv1d_q.weight"][1] == (1, 64, 1, 4)
    assert stored(path)["blk.0.ssm_a"][1] == (1, 1, 4, 1)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.KIMI_LINEAR, 64)
    with weightsmith.open_checkpoint(source) as here, weightsmith.open_checkpoint(path) as back:
        assert list(back.specs) == list(here.specs)
        for name, spec in here.specs.items():
            assert back.specs[name].shape == spec.shape
            assert np.array_equal(back.read(name).astype(spec.dtype.numpy), here.read(name)), name
            module, _, kind = name.rpartition(".")
            if kind == "weight" and "experts" not in name and "kv_b_proj" not in name:
                assert f"{known.get_name(module)}.weight" in stored(path)
        import transformers

        theirs, ours = (transformers.AutoConfig.from_pretrained(folder.folder).to_dict() for folder in (here, back))
    unlike = ("architectures", "dtype", "transformers_version", "_name_or_path", "eos_token_id", "bos_token_id", "pad_token_id")
    unlike += ("first_k_dense_replace", "linear_attn_config", "moe_layer_freq", "use_grouped_topk", "rope_theta")
    for key, value in theirs.items():
        expected = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert key in unlike or ours.get(key) == expected, key


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.reader
@pytest.mark.parametrize("changes", [{}, {"n_group": 2, "topk_group": 1}, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}])
def test_llama_cpp_computes_what_transformers_does(changes: dict[str, Any], tmp_path: Path) -> None:
    import torch

    source = published(saved(tmp_path / "m", **changes))
    tensors = load_file(
        source / "model.safetensors"
    )  # llama.cpp adds another number where it makes queries and keys as long as 1
    larger = {name: values * np.float32(3 if values.ndim == 2 else 1) for name, values in tensors.items()}
    save_file(larger, source / "model.safetensors", {"format": "pt"})
    path, tokens = quantize(source, tmp_path / "q"), np.random.default_rng(0).integers(0, 256, 40).tolist()
    model, missing = zoo.load("kimi-linear", source)
    assert not any(missing.values())
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(path) as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_renormalize": False}, "moe_renormalize is False, and llama.cpp takes True for granted"),
        ({"q_lora_rank": 8}, "q_lora_rank is 8, and llama.cpp takes None"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, and llama.cpp takes 4"),
        ({"linear_num_heads": 2}, "linear_num_heads is 2, and llama.cpp takes 4"),
        ({"linear_attn_config": {"num_heads": 2}}, "linear_num_heads is 2, and llama.cpp takes 4"),
        (
            {"layer_types": ["full_attention"] * 3},
            "layer_types is .*, not full_attention or linear_attention for each of 4",
        ),
        (
            {"layer_types": ["full_attention"] + ["linear_attention"] * 3},
            "by layer_types, layer 0 has full_attention, unlike its tensors",
        ),
        ({"layer_types": None}, "by layer_types, layer 2 has linear_attention, unlike its tensors"),
        ({"layer_types": None, "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2]}}, "layer_types is"),
        ({"mlp_layer_types": ["sparse"] * 4}, "by mlp_layer_types, layer 0 is sparse, unlike its tensors"),
        ({"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types is .*, not dense at the start of 4 layers"),
        ({"mlp_layer_types": None, "first_k_dense_replace": 2}, "by mlp_layer_types, layer 1 is dense, unlike its tensors"),
        ({"linear_head_dim": 8}, "f_a_proj.weight: linear_head_dim is 8 in config.json"),
        ({"kv_lora_rank": 7}, r"kv_lora_rank \+ qk_rope_head_dim is 15"),
        ({"v_head_dim": 23}, r"its 160 rows are not 16 \+ 23, once or several times"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q")
