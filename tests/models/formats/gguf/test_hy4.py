"""Hy 4: published names, what llama.cpp computes of it, and settings that llama.cpp does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files, write_gguf
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from weightsmith._base.errors import FormatError, PlanError, Unsupported
from weightsmith._models.formats.gguf.header import read_gguf_header

Floats = npt.NDArray[np.float32]


def saved(folder: Path, **changes: Any) -> Path:
    source = zoo.save("hy-v4", folder, 1, **{"vocab_size": 262, "dtype": "float32", **changes})
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    return source


def tensors_of(source: Path) -> dict[str, Floats]:
    with weightsmith.open_checkpoint(source) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.specs}


def written(source: Path) -> Path:
    out = source.with_name(f"{source.name}-q")
    weightsmith.quantize(source, out, "gguf-f32", progress=False)
    return out / "model.gguf"


def keys_of(path: Path) -> dict[str, str]:
    return {name: str(value) for name, value in read_gguf_header(path).keys.items() if name.startswith("hy_v4.")}


@pytest.mark.long
def test_both_layouts_give_one_file_and_come_back(tmp_path: Path) -> None:
    plain = written(saved(tmp_path / "plain"))
    source = saved(tmp_path / "m")
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1}
    tensors = {zoo.published_name_of_hy_v4(name): values for name, values in tensors_of(source).items()}
    behind = {f"model.mtp_layers.0.{name}.weight": np.ones(32, np.float32) for name in ("enorm", "hnorm")}
    write_checkpoint(source, tensors | behind, config)
    quantised = weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    assert any("2 tensors are left out: layers that predict several tokens" in str(warning) for warning in quantised.warnings)
    path = tmp_path / "q" / "model.gguf"
    assert stored(path) == stored(plain)
    assert keys_of(path) == keys_of(plain)
    assert keys_of(path)["hy_v4.attention.indexer.types"] == "[ True False  True]"
    with weightsmith.open_checkpoint(path) as back:
        assert sorted(back.specs) == sorted(tensors)
        for name, values in tensors.items():
            assert np.array_equal(back.read(name), values), name
        import transformers

        theirs, ours = (transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (source, back.folder))
    unlike = ("architectures", "dtype", "transformers_version", "_name_or_path", "eos_token_id", "bos_token_id", "pad_token_id")
    unlike += ("num_nextn_predict_layers", "first_k_dense_replace")
    for key, value in theirs.items():
        assert key in unlike or ours.get(key) == value, key
    weightsmith.dequantize(path, tmp_path / "back", progress=False)
    _, missing = zoo.load("hy-v4", tmp_path / "back")
    assert not any(missing.values())


def halves(values: Floats, width: int, turned: int) -> Floats:
    """Rows of heads whose ends RoPE turns: first the even ones of each end, then the odd ones."""
    heads = values.reshape(-1, width, *values.shape[1:]).copy()
    end = heads[:, width - turned :]
    heads[:, width - turned :] = np.concatenate([end[:, ::2], end[:, 1::2]], 1)
    return heads.reshape(values.shape)


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.reader
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"index_topk": 40, "n_shared_experts": 2, "mlp_layer_types": ["dense", "dense", "sparse"], "swiglu_limit": 0.25},
        {"index_topk": 40, "index_head_dim": 24, "index_n_heads": 4, "norm_topk_prob": False},
        {"hc_mult": 2, "hc_eps": 0.01, "hc_magnitude": 1.5, "num_hidden_layers": 6, "indexer_types": None},
    ],
)
def test_llama_cpp_computes_the_same_but_for_the_order_of_what_rope_turns(changes: dict[str, Any], tmp_path: Path) -> None:
    """transformers turns halves of heads: where the rows of neighbours are moved there, both compute the same."""
    import torch

    source = saved(tmp_path / "m", **changes)
    config = json.loads((source / "config.json").read_text())
    tensors = {name: values * np.float32(3 if values.ndim > 1 else 1) for name, values in tensors_of(source).items()}
    path = written(write_checkpoint(source, tensors, config))
    width = config["index_head_dim"]
    widths = {"q_b_proj.weight": 24, "kv_a_proj_with_mqa.weight": 16, "wq_b.weight": width, "wk.weight": width}
    widths |= {"k_norm.weight": width, "k_norm.bias": width}
    for name, values in tensors.items():
        if end := next((end for end in widths if name.endswith(f".{end}")), ""):
            tensors[name] = halves(values, widths[end], 8)
    tokens, logits = np.random.default_rng(0).integers(0, 256, 40).tolist(), []
    for _ in range(2):
        model, missing = zoo.load("hy-v4", source)
        assert not any(missing.values())
        with torch.inference_mode():
            logits.append(model(torch.tensor([tokens])).logits[0].numpy())
        write_checkpoint(source, tensors, config)
    as_saved, moved = logits
    with llama_cpp.Judge(path) as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - moved).max() < 2e-3 * np.abs(moved).max()
    assert np.abs(ours - as_saved).max() > 4 * np.abs(ours - moved).max()


def test_a_warning_says_what_llama_cpp_computes_otherwise(tmp_path: Path) -> None:
    plan = weightsmith.plan(
        {"merge_method": "passthrough", "models": [{"model": str(saved(tmp_path / "m"))}]}, quantize="gguf-f32"
    )
    assert any("RoPE turns pairs of neighbours" in str(warning) for warning in plan.warnings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_group": 2, "topk_group": 1}, "n_group is 2, and llama.cpp takes 1 for granted"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and llama.cpp takes False for granted"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and llama.cpp takes 'silu' for granted"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0, not a positive number"),
        ({"index_head_dim": 8}, "index_head_dim is 8, not more than qk_rope_head_dim, 8, as llama.cpp needs it"),
        ({"index_head_dim": 32}, "wk.weight: index_head_dim is 32 in config.json"),
        ({"index_n_heads": 16}, "index_n_heads .*is "),
        ({"indexer_types": ["shared", "full", "full"]}, "indexer_types is .*, not full or shared for each of 3 layers"),
        ({"indexer_types": ["full"] * 2}, "indexer_types is .*, not full or shared for each of 3 layers"),
        ({"mlp_layer_types": ["dense"] * 3}, "first_k_dense_replace is 3, and layer 1 has experts"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_type is 'yarn', and llama.cpp"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    config = {**json.loads((source / "config.json").read_text()), **changes}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=words):
        written(source)


@pytest.mark.parametrize("types", [["full", "full", "full"], ["full", "shared", "shared"]])
def test_layers_whose_tensors_are_not_those_of_their_indexer(types: list[str], tmp_path: Path) -> None:
    source = saved(tmp_path / "m")
    config = {**json.loads((source / "config.json").read_text()), "indexer_types": types}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=f"by indexer_types, layer {1 if types[1] == 'full' else 2} is {types[2]}, unlike its"):
        written(source)


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("attention.indexer.types", [True], FormatError, r"indexer\.types is .*, not a truth value for each of 3 layers"),
        ("swiglu_clamp_exp", [0.5, 0.5, 0.25], Unsupported, "layers with different swiglu_clamp_exp"),
    ],
)
def test_keys_that_config_json_cannot_say(key: str, value: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    path = written(saved(tmp_path / "m"))
    keys = {
        name.removeprefix("hy_v4."): other.tolist() if isinstance(other, np.ndarray) else other
        for name, other in read_gguf_header(path).keys.items()
        if name.startswith(("hy_v4.", "tokenizer."))
    }
    tensors = {name: (np.frombuffer(data, "<f4").reshape(shape), "F32") for name, (_, shape, data) in stored(path).items()}
    with pytest.raises(error, match=words):
        weightsmith.open_checkpoint(write_gguf(tmp_path / "changed.gguf", "hy_v4", tensors, {**keys, key: value}))
