"""Embedding models as GGUF files: names without `model.`, how tokens are pooled, the token that ends a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import weightsmith
from tests import llama_cpp, zoo
from tests.gguf_help import BYTE_LEVEL, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from weightsmith._base.errors import FormatError, PlanError, Unsupported
from weightsmith._models.formats.gguf.about import pooling_keys

MODULES = [
    {"type": f"sentence_transformers.models.{name}", "path": path}
    for name, path in (("Transformer", ""), ("Pooling", "1_Pooling"))
]


def pooling_of(settings: Mapping[str, Any], modules: Any = MODULES) -> dict[str, int]:
    files = {"1_Pooling/config.json": json.dumps(settings).encode()}
    values, _ = pooling_keys(json.dumps(modules).encode(), "qwen3", files.get)
    return {name: value.value for name, value in values.items()}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, 3),
        ({"pooling_mode_mean_tokens": True}, 1),
        ({"pooling_mode_cls_token": True}, 2),
        ({"pooling_mode": "lasttoken"}, 3),
        ({"pooling_mode": "mean"}, 1),
        ({"pooling_mode": "cls"}, 2),
    ],
)
def test_the_ways_to_pool_are_llama_cpps(settings: Mapping[str, Any], number: int) -> None:
    assert pooling_of(settings) == {"qwen3.pooling_type": number}


def test_what_llama_cpp_cannot_pool_is_refused() -> None:
    for settings in ({"pooling_mode_max_tokens": True}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, {}):
        with pytest.raises(
            Unsupported, match=r"its tokens are pooled by .*, and llama.cpp knows mean_tokens, cls_token, lasttoken"
        ):
            pooling_of(settings)
    assert pooling_keys(None, "qwen3", lambda name: None) == ({}, [])
    _, [warning] = pooling_keys(json.dumps(MODULES).encode(), "qwen3", lambda name: None)
    assert "names the module '1_Pooling', which is missing" in str(warning)
    with pytest.raises(FormatError, match=r"modules\.json"):
        pooling_keys(b"{", "qwen3", lambda name: None)
    for path in ("../1_Pooling", "/1_Pooling", "a/b"):
        read = {f"{path}/config.json": b'{"pooling_mode_max_tokens": true}'}
        assert pooling_keys(json.dumps([{**MODULES[1], "path": path}]).encode(), "qwen3", read.get) == ({}, [])


def test_modules_that_a_file_does_not_have_are_named() -> None:
    modules = [*MODULES, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    modules.append({"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"})
    files = {"1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}'}
    values, [warning] = pooling_keys(json.dumps(modules).encode(), "gemma3", files.get)
    assert list(values) == ["gemma3.pooling_type"]
    assert "without its modules 'Dense': llama.cpp gives other vectors" in str(warning)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Qwen3 whose names begin with layers., as in Qwen3-Embedding; its tokenizer puts another token than its eos last."""
    folder = tmp_path / "m"
    zoo.save("qwen3", tmp_path / "whole", 0, vocab_size=262, tie_word_embeddings=True, dtype="float32")
    with weightsmith.open_checkpoint(tmp_path / "whole") as found:
        tensors = {name.removeprefix("model."): np.array(found.read(name)) for name in found if not name.startswith("lm_head")}
        config = dict(found.config or {})
    from tests.mini import write_checkpoint

    write_checkpoint(folder, tensors, config)
    for name, content in tokenizer_files(BYTE_LEVEL).items():
        (folder / name).write_bytes(content)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<think>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<think>": {"id": "<think>", "ids": [261], "tokens": ["<think>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


def test_an_embedding_model_has_its_pooling_and_the_token_that_ends_a_text(model: Path, tmp_path: Path) -> None:
    made = weightsmith.quantize(model, tmp_path / "out", "gguf-f32", progress=False)
    assert not {"modules.json", "1_Pooling/config.json"} & {name for names in made.plan.lacking.values() for name in names}
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["qwen3.pooling_type"] == 3
    assert (keys["tokenizer.ggml.eos_token_id"], keys["tokenizer.ggml.eot_token_id"]) == (261, 260)
    assert keys["tokenizer.ggml.add_eos_token"] is True
    assert {"blk.0.attn_q.weight", "token_embd.weight", "output_norm.weight"} < {t.name for t in reader.tensors}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "model.gguf",
        "recipe.yml",
        "weightsmith.json",
    ]
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(PlanError, match="pooled by 'max_tokens'"):
        weightsmith.quantize(model, tmp_path / "b", "gguf-f32", progress=False)


@needs_llama_cpp
def test_llama_cpp_computes_what_it_computes_of_the_whole_model(model: Path, tmp_path: Path) -> None:
    for name in ("1_Pooling", "modules.json"):  # with them, it computes vectors only
        (model / name).rename(tmp_path / name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "whole" / name).write_bytes((model / name).read_bytes())
    found = []
    for source in (model, tmp_path / "whole"):
        weightsmith.quantize(source, tmp_path / f"{source.name}-out", "gguf-f32", progress=False)
        with llama_cpp.Judge(tmp_path / f"{source.name}-out" / "model.gguf") as judge:
            found.append(judge.logits([5, 6, 7, 261]))
    assert np.array_equal(*found)
