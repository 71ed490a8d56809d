"""Mixtures of experts: settings that llama.cpp has in its code, and keys that it would read otherwise than transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, tokenizer_files, write_gguf
from tests.llama_cpp import needs_llama_cpp
from weightsmith._base.errors import PlanError, Unsupported
from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._models.formats.gguf.tokenizer import files


def saved(name: str, folder: Path, **changes: Any) -> Path:
    source = zoo.save(name, folder, 1, vocab_size=262)
    (source / "tokenizer.json").write_bytes(tokenizer_files(BYTE_LEVEL)["tokenizer.json"])
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
    return source


def written(name: str, folder: Path, **changes: Any) -> Path:
    weightsmith.quantize(saved(name, folder / "m", **changes), folder / "q", "gguf-f32", progress=False)
    return folder / "q" / "model.gguf"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("afmoe", {"mup_enabled": False}, "mup_enabled is False, and llama.cpp takes True for granted"),
        ("afmoe", {"mup_enabled": "absent"}, "mup_enabled is False, and llama.cpp takes True for granted"),
        ("afmoe", {"route_norm": False}, "route_norm is False, and llama.cpp takes True for granted"),
        ("afmoe", {"score_func": "softmax"}, "score_func is 'softmax', and llama.cpp takes 'sigmoid' for granted"),
        ("afmoe", {"layer_types": ["full_attention"] * 5}, r"layer_types is \['full_attention'"),
        (
            "afmoe",
            {"layer_types": "absent", "global_attn_every_n_layers": 3},
            "global_attn_every_n_layers is 3, and llama.cpp takes 4 for granted",
        ),
        ("afmoe", {"sliding_window": None}, "sliding_window is missing"),
        ("afmoe", {"num_dense_layers": 2}, "num_dense_layers is 2, and layer 1 has experts"),
        ("exaone-moe", {"sliding_window": None, "layer_types": ["full_attention"] * 5}, "sliding_window is missing"),
        ("exaone-moe", {"mlp_layer_types": ["sparse"] * 5}, "first_k_dense_replace is 0, and layer 0 has no experts"),
        ("exaone-moe", {"num_shared_experts": 3}, r"num_shared_experts \* moe_intermediate_size is 48"),
        ("hunyuan-moe", {"moe_topk": [2, 1]}, r"moe_topk is \[2, 1\], not a positive whole number"),
        ("hunyuan-moe", {"moe_intermediate_size": 24}, "moe_intermediate_size is 24, and llama.cpp takes 48 for granted"),
        ("hunyuan-moe", {"num_shared_expert": [2, 2]}, "num_shared_expert is 2, and llama.cpp takes 1 for granted"),
        ("hunyuan-moe", {"use_cla": True}, "use_cla is True, and llama.cpp takes False for granted"),
        ("hunyuan-moe", {"norm_topk_prob": False}, "norm_topk_prob is False, and llama.cpp takes True for granted"),
    ],
)
def test_settings_that_llama_cpp_does_not_have(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        written(name, tmp_path, **changes)


def test_scores_of_trinity_are_always_normalised(tmp_path: Path) -> None:
    """config.json of transformers does not say so, and llama.cpp does not normalise them where the file does not say it."""
    path = written("afmoe", tmp_path)
    reader = gguf.GGUFReader(path)
    keys = {name.removeprefix("afmoe."): field.contents() for name, field in reader.fields.items()}
    assert keys["expert_weights_norm"] is True
    kept = {name: value for name, value in keys.items() if not name.startswith("GGUF.") and name != "general.architecture"}
    tensors = {tensor.name: (np.array(tensor.data), "F32") for tensor in reader.tensors}
    weightsmith.open_checkpoint(write_gguf(tmp_path / "same.gguf", "afmoe", tensors, kept)).close()
    for changed in ({**kept, "expert_weights_norm": False}, {n: v for n, v in kept.items() if n != "expert_weights_norm"}):
        other = write_gguf(tmp_path / "other.gguf", "afmoe", tensors, changed)
        with pytest.raises(Unsupported, match=r"afmoe\.expert_weights_norm is not true, and transformers always normalises"):
            weightsmith.open_checkpoint(other)


@needs_llama_cpp
@pytest.mark.slow
def test_llama_cpp_splits_text_as_k_exaone_does(tmp_path: Path) -> None:
    """With merges across all of the text, so that only the splits keep its parts apart."""
    import tokenizers as library

    atoms = (
        "the",
        "The",
        "ab",
        "'s",
        "'LL",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "1",
        "23",
        "½",
        "!",
        "...",
        "/",
        "_",
        "中文",
        "か",
        "한국",
    )
    atoms += ("\u00e9", "e\u0301", "\u0931\u093c", "\u02b0", "\u2163", "\U0001f600")
    random = np.random.default_rng(0)
    texts = ["".join(atoms[i] for i in random.integers(0, len(atoms), 12)) for _ in range(4000)]
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained = library.Tokenizer(library.models.BPE())
    trained.pre_tokenizer = level
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        texts, library.trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    )
    pattern = library.Regex(files._EXAONE)
    trained.pre_tokenizer = library.pre_tokenizers.Sequence([library.pre_tokenizers.Split(pattern, "isolated"), level])
    source = zoo.save("exaone-moe", tmp_path / "m", 1, vocab_size=trained.get_vocab_size())
    trained.save(str(source / "tokenizer.json"))
    weightsmith.quantize(source, tmp_path / "q", "gguf-f16", progress=False)
    assert read_gguf_header(tmp_path / "q" / "model.gguf").keys["tokenizer.ggml.pre"] == "exaone-moe"
    with llama_cpp.Judge(tmp_path / "q" / "model.gguf") as judge:
        for text in texts[:1000]:
            assert judge.tokens(text) == trained.encode(text, add_special_tokens=False).ids, text


def test_numbers_that_hunyuan_lists_for_each_layer(tmp_path: Path) -> None:
    plain = read_gguf_header(written("hunyuan-moe", tmp_path / "plain")).keys
    listed = {"num_experts": [4, 4], "moe_topk": [2, 2], "moe_intermediate_size": [48, 48], "num_shared_expert": [1, 1]}
    keys = read_gguf_header(written("hunyuan-moe", tmp_path / "listed", **listed)).keys
    assert {name: str(value) for name, value in keys.items()} == {name: str(value) for name, value in plain.items()}
