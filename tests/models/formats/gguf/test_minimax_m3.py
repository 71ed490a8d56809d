"""MiniMax M3: published files, blocks of tokens that are chosen, and settings that llama.cpp does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, stored, tokenizer_files, write_gguf
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from weightsmith._base.errors import PlanError, Unsupported
from weightsmith._models.formats.gguf.header import read_gguf_header

SPARSE = {
    **{"sparse_num_index_heads": "index_n_heads", "sparse_index_dim": "index_head_dim"},
    **{"sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks"},
    "sparse_local_block": "index_local_blocks",
}


def saved(folder: Path, **changes: Any) -> Path:
    source = zoo.save("minimax-m3", folder, 1, vocab_size=262, dtype="float32")
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(config))
    return source


def written(source: Path) -> Path:
    weightsmith.quantize(source, source.parent / "q", "gguf-f32", progress=False)
    return source.parent / "q" / "model.gguf"


def published_name(name: str) -> str:
    """As MiniMax calls it, within a model for images."""
    name = name.replace(".mlp.gate.e_score", ".block_sparse_moe.e_score").replace(".mlp.gate.", ".block_sparse_moe.gate.")
    name = name.replace(".mlp.shared_experts.", ".block_sparse_moe.shared_experts.").replace(".indexer.", ".index_")
    return f"language_model.{name}"


def published(source: Path) -> None:
    """As MiniMax publishes it, and transformers saves the whole model: with a matrix for each gate, up and expert."""
    config = json.loads((source / "config.json").read_text())
    kinds, layers = config.pop("mlp_layer_types"), config.pop("layer_types")
    config["moe_layer_freq"] = [int(kind == "sparse") for kind in kinds]
    config["sparse_attention_config"] = {name: config.pop(ours) for name, ours in SPARSE.items()}
    config["sparse_attention_config"]["sparse_attention_freq"] = [int(kind != "full_attention") for kind in layers]
    config |= {"hidden_act": "swigluoai", "partial_rotary_factor": 0.5, "rope_theta": 1e4, "n_shared_experts": 1}
    del config["rope_parameters"]
    tensors = {}
    with weightsmith.open_checkpoint(source) as checkpoint:
        for name in checkpoint.specs:
            values, stem = checkpoint.read(name), published_name(name)
            if ".mlp.experts." in name:
                stem = stem.rpartition(".mlp.")[0] + ".block_sparse_moe.experts"
                both = name.endswith("gate_up_proj")
                for expert, matrix in enumerate(values):
                    parts = zip(("w1", "w3"), np.split(matrix, 2), strict=True) if both else [("w2", matrix)]
                    tensors |= {f"{stem}.{expert}.{part}.weight": np.ascontiguousarray(half) for part, half in parts}
            elif name.endswith(".gate_up_proj.weight"):
                for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
                    tensors[stem.replace("gate_up", part)] = np.ascontiguousarray(half)
            else:
                tensors[stem] = values
    tensors["patch_merge_mlp.linear_1.weight"] = np.zeros((4, 4), np.float32)
    whole = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl"}
    write_checkpoint(source, tensors, {**whole, "text_config": config, "vision_config": {}})


@pytest.mark.long
def test_published_files_give_the_same_file(tmp_path: Path) -> None:
    plain = written(saved(tmp_path / "plain" / "m"))
    source = saved(tmp_path / "m")
    published(source)
    path = written(source)
    assert stored(path) == stored(plain)
    keys = [
        {name: str(value) for name, value in read_gguf_header(file).keys.items() if name.startswith("minimax-m3.")}
        for file in (plain, path)
    ]
    assert keys[0] == keys[1]
    assert len(keys[0]) > 20


@pytest.mark.long
def test_names_are_those_of_transformers(tmp_path: Path) -> None:
    """Which saves the whole model under published names, and loads its language model alone under others."""
    text = {**zoo.ZOO["minimax-m3"][2], "vocab_size": 262}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    arguments = {"text_config": text, "vision_config": vision, "projector_hidden_size": 32}
    source = zoo.save_as("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLConfig", arguments, tmp_path / "m", 1)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    path = written(source)
    weightsmith.dequantize(path, tmp_path / "back", progress=False)
    _, missing = zoo.load("minimax-m3", tmp_path / "back")
    assert not any(missing.values())


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("blocks", [2, 5])
def test_llama_cpp_computes_the_same_of_chosen_blocks_and_of_all(blocks: int, tmp_path: Path) -> None:
    import torch

    source = saved(tmp_path / "m", index_topk_blocks=blocks)
    path = written(source)
    model, _ = zoo.load("minimax-m3", source)
    tokens = np.random.default_rng(0).integers(0, 256, 40).tolist()
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    with llama_cpp.Judge(path) as judge:
        ours = judge.logits(tokens)
    assert np.abs(ours - theirs).max() < 0.003 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swiglu_limit": 6.0}, "swiglu_limit is 6.0, and llama.cpp takes 7.0 for granted"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0, and llama.cpp takes 1.702 for granted"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and llama.cpp takes 'silu' for granted"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and llama.cpp takes False for granted"),
        ({"index_n_heads": 1}, "index_n_heads is 1, and llama.cpp takes 2 for granted"),
        ({"index_block_size": 24}, "index_block_size is 24, which does not divide 256"),
        ({"rotary_dim": 8}, "rotary_dim is 8, and llama.cpp takes 4 for granted"),
        ({"layer_types": None}, r"layer_types is \['full_attention', .*, and llama.cpp takes"),
        ({"mlp_layer_types": ["dense", "dense", "sparse"]}, r"layer_types is .*, and llama.cpp takes"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, r"layer_types is .*, and llama.cpp takes"),
        ({"shared_intermediate_size": 20}, "shared_intermediate_size is 20, not a multiple of intermediate_size, 24"),
        ({"shared_intermediate_size": 48}, r"\(shared_intermediate_size / intermediate_size\) \* intermediate_size is 48"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        written(saved(tmp_path / "m", **changes))


def test_a_file_that_does_not_normalise_the_weights_of_experts(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(written(saved(tmp_path / "m")))
    keys = {name.removeprefix("minimax-m3."): field.contents() for name, field in reader.fields.items()}
    kept = {name: value for name, value in keys.items() if not name.startswith("GGUF.") and name != "general.architecture"}
    del kept["expert_weights_norm"]
    tensors = {tensor.name: (np.array(tensor.data), "F32") for tensor in reader.tensors}
    with pytest.raises(Unsupported, match=r"minimax-m3\.expert_weights_norm is not true"):
        weightsmith.open_checkpoint(write_gguf(tmp_path / "other.gguf", "minimax-m3", tensors, kept))
