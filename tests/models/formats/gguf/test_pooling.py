"""Embedding models as GGUF files: names without `model.`, how tokens are pooled, the token that ends a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import weightsmith
from tests import llama_cpp, zoo
from tests.encoder_help import with_modules
from tests.gguf_help import BYTE_LEVEL, PIECES, SENTENCEPIECE, stored, tokenizer_files
from tests.llama_cpp import needs_llama_cpp
from weightsmith._base.errors import FormatError, PlanError, Unsupported
from weightsmith._models.formats.gguf.pooling import Pooling, pooling_of

MODULES = [
    {"type": f"sentence_transformers.models.{name}", "path": path}
    for name, path in (("Transformer", ""), ("Pooling", "1_Pooling"))
]


def read_modules(modules: Any, read: Callable[[str], bytes | None], architecture: str = "qwen3") -> Pooling:
    """How a model with these modules pools; bytes: the file itself."""
    data = modules if isinstance(modules, bytes) else json.dumps(modules).encode()
    return pooling_of({"modules.json": data}, architecture, read)


def number_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    files = {"1_Pooling/config.json": json.dumps(settings).encode()}
    return {name: value.value for name, value in read_modules(MODULES, files.get).values.items()}


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
    assert number_of(settings) == {"qwen3.pooling_type": number}


def test_what_llama_cpp_cannot_pool_is_refused() -> None:
    for settings in ({"pooling_mode_max_tokens": True}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, {}):
        with pytest.raises(
            Unsupported, match=r"its tokens are pooled by .*, and llama.cpp knows mean_tokens, cls_token, lasttoken"
        ):
            number_of(settings)
    assert pooling_of({}, "qwen3", lambda name: None) == Pooling()
    [warning] = read_modules(MODULES, lambda name: None).warnings
    assert "names the module '1_Pooling', which is missing" in str(warning)
    with pytest.raises(FormatError, match=r"modules\.json"):
        read_modules(b"{", lambda name: None)
    for path in ("../1_Pooling", "/1_Pooling", "a/b"):
        read = {f"{path}/config.json": b'{"pooling_mode_max_tokens": true}'}
        assert read_modules([{**MODULES[1], "path": path}], read.get) == Pooling()


def test_modules_that_make_other_vectors_are_refused() -> None:
    modules = [MODULES[0], {"type": "sentence_transformers.sparse_encoder.modules.SpladePooling", "path": "1_SpladePooling"}]
    with pytest.raises(Unsupported, match=r"its module 'SpladePooling' makes vectors that llama\.cpp does not make"):
        read_modules(modules, lambda name: None)


def test_modules_that_a_file_does_not_have_are_named() -> None:
    modules = [*MODULES, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    modules.append({"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"})
    files = {"1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}'}
    pooling = read_modules(modules, files.get, "gemma3")
    [warning] = pooling.warnings
    assert list(pooling.values) == ["gemma3.pooling_type"]
    assert "without its modules 'Dense': llama.cpp gives other vectors" in str(warning)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Qwen3 whose names begin with layers., as in Qwen3-Embedding; its tokenizer puts another token than its eos last."""
    folder = tmp_path / "m"
    zoo.save("qwen3", tmp_path / "whole", 0, vocab_size=262, tie_word_embeddings=True, dtype="float32")
    with weightsmith.open_checkpoint(tmp_path / "whole") as checkpoint:
        tensors = {
            name.removeprefix("model."): np.array(checkpoint.read(name))
            for name in checkpoint
            if not name.startswith("lm_head")
        }
        config = dict(checkpoint.config or {})
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
    quantised = weightsmith.quantize(model, tmp_path / "out", "gguf-f32", progress=False)
    assert not {"modules.json", "1_Pooling/config.json"} & {name for names in quantised.plan.lacking.values() for name in names}
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
    logits = []
    for source in (model, tmp_path / "whole"):
        weightsmith.quantize(source, tmp_path / f"{source.name}-out", "gguf-f32", progress=False)
        with llama_cpp.Judge(tmp_path / f"{source.name}-out" / "model.gguf") as judge:
            logits.append(judge.logits([5, 6, 7, 261]))
    assert np.array_equal(*logits)


# ---- rerankers that are language models


PROMPT = "tokenizer.chat_template.rerank"
CARD = "---\nlicense: apache-2.0\n---\n# Qwen3-Reranker-0.6B\n"


def reranker(folder: Path, seed: int = 1, *, tied: bool = True, **changes: Any) -> Path:
    """A Qwen3 whose tokenizer has the tokens for yes and no."""
    zoo.save("qwen3", folder, seed, vocab_size=264, tie_word_embeddings=tied, dtype="float32", **changes)
    for name, content in tokenizer_files(BYTE_LEVEL).items():
        (folder / name).write_bytes(content)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"no": 262, "yes": 263}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def with_scores(folder: Path, settings: Mapping[str, Any]) -> Path:
    kinds = (("base.modules.transformer.Transformer", ""), ("cross_encoder.modules.logit_score.LogitScore", "1_LogitScore"))
    modules = [{"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.{k}"} for i, (k, p) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(settings))
    return folder


@needs_llama_cpp
@pytest.mark.parametrize("stated", ["card", "modules"])
@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_ranks_as_the_logits_of_yes_and_no(stated: str, tied: bool, tmp_path: Path) -> None:
    import torch

    source = reranker(tmp_path / "m", tied=tied)
    if stated == "card":
        (source / "README.md").write_text(CARD)
    else:
        with_scores(source, {"true_token_id": 263, "false_token_id": 262})
    weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    path = tmp_path / "q" / "model.gguf"
    keys = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert (keys["qwen3.pooling_type"], keys["qwen3.classifier.output_labels"]) == (4, ["yes", "no"])
    assert keys["tokenizer.chat_templates"] == ["rerank"]
    assert "<Query>: {query}\n<Document>: {document}<|im_end|>" in keys[PROMPT]
    assert "output.weight" not in stored(path)
    tokens = [5, 6, 7, 100, 3]
    model, _ = zoo.load("qwen3", source)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1, [263, 262]]
    with llama_cpp.Judge(path) as judge:
        assert np.abs(judge.pooled(tokens) - logits.softmax(0).numpy()).max() < 1e-4


@pytest.mark.long
def test_a_reranker_straight_from_a_merge(tmp_path: Path) -> None:
    for seed, part in enumerate("abc"):
        (reranker(tmp_path / part, seed, tied=False) / "README.md").write_text(CARD)
    models = [{"model": str(tmp_path / part), "parameters": {"weight": 0.7, "density": 0.5}} for part in "bc"]
    recipe = {"merge_method": "ties", "base_model": str(tmp_path / "a"), "models": models, "dtype": "float32"}
    weightsmith.merge(recipe, tmp_path / "q", quantize="gguf-q8_0", progress=False)
    weightsmith.merge(recipe, tmp_path / "plain", progress=False)
    (tmp_path / "plain" / "README.md").write_text(CARD)
    weightsmith.quantize(tmp_path / "plain", tmp_path / "p", "gguf-q8_0", progress=False)
    assert stored(tmp_path / "q" / "model.gguf") == stored(tmp_path / "p" / "model.gguf")


@pytest.mark.parametrize("settings", [{"true_token_id": 263}, {"true_token_id": "x", "false_token_id": 262}])
def test_scores_that_llama_cpp_does_not_have_are_named(settings: Mapping[str, Any], tmp_path: Path) -> None:
    source = with_scores(reranker(tmp_path / "m"), settings)
    quantised = weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    assert ["without its modules 'LogitScore'" in str(warning) for warning in quantised.warnings] == [True]


@pytest.mark.long
def test_a_file_with_tensors_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    ranks = with_scores(reranker(tmp_path / "ranks"), {"true_token_id": 263, "false_token_id": 262})
    for source, tensor in ((ranks, "cls.output.weight"), (embedding_gemma(tmp_path / "dense"), "dense_2.weight")):
        weightsmith.quantize(source, tmp_path / f"{source.name}-q", "gguf-f32", progress=False)
        with pytest.raises(Unsupported, match=f"tensor '{tensor}' does not belong to a model of the family"):
            weightsmith.open_checkpoint(tmp_path / f"{source.name}-q")


def test_scores_of_rows_that_the_head_does_not_have(tmp_path: Path) -> None:
    source = with_scores(reranker(tmp_path / "m"), {"true_token_id": 264, "false_token_id": 262})
    with pytest.raises(PlanError, match="the head has 264 rows, and the scores are those of 264, 262"):
        weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)


# ---- EmbeddingGemma, and matrices behind the pooling

DENSE = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


def embedding_gemma(folder: Path, seed: int = 0, *, inner: int = 48, **changes: Any) -> Path:
    """A tiny EmbeddingGemma with two matrices, and SentencePiece's tokenizer."""
    arguments = {**zoo.ZOO["gemma3-text"][2], "num_hidden_layers": 7, "vocab_size": len(PIECES), "query_pre_attn_scalar": 8}
    arguments |= {"use_bidirectional_attention": True, "sliding_window": 16, "pad_token_id": 0, "max_position_embeddings": 128}
    zoo.save_as("Gemma3TextModel", "Gemma3TextConfig", arguments, folder, seed, dtype="float32")
    for name, content in tokenizer_files({**SENTENCEPIECE, "tokenizer.ggml.add_space_prefix": False}).items():
        (folder / name).write_bytes(content)
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "pad_token": "<unk>"}))
    with_modules(folder, "mean_tokens", "Dense", "Dense", "Normalize")
    rng = np.random.default_rng(seed)
    for path, inputs, outputs in (("2_Dense", 32, inner), ("3_Dense", inner, 32)):
        settings = {"in_features": inputs, "out_features": outputs, **DENSE, **changes}
        (folder / path / "config.json").write_text(json.dumps(settings))
        weight = rng.standard_normal((outputs, inputs)).astype(np.float32) * 0.1
        save_file({"linear.weight": weight}, folder / path / "model.safetensors")
    return folder


@pytest.mark.long
@needs_llama_cpp
def test_llama_cpp_makes_the_vectors_of_embedding_gemma(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    source = embedding_gemma(tmp_path / "m")
    quantised = weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    assert not any("Dense" in str(warning) for warning in quantised.warnings)
    path = tmp_path / "q" / "model.gguf"
    keys = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert (keys["general.architecture"], keys["gemma-embedding.pooling_type"]) == ("gemma-embedding", 1)
    assert [keys[f"gemma-embedding.dense_{i}_feat_{end}"] for i in (2, 3) for end in ("in", "out")] == [32, 48, 48, 32]
    assert keys["gemma-embedding.attention.sliding_window"] == 16
    assert [name for name in stored(path) if name.startswith("dense")] == ["dense_2.weight", "dense_3.weight"]
    texts = ["ab a b", "abab ab a a b ab abcab ab a b abab ba"]
    theirs = SentenceTransformer(str(source), device="cpu").encode(texts)
    with llama_cpp.Judge(path) as judge:
        for text, expected in zip(texts, theirs, strict=True):
            ours = judge.pooled(judge.tokens(text, around=True))
            assert np.abs(ours / np.linalg.norm(ours) - expected).max() < 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [{"bias": True}, {"activation_function": "torch.nn.modules.activation.Tanh"}, {"use_residual": True}]
)
def test_matrices_that_llama_cpp_does_not_have_are_left_out(changes: dict[str, Any], tmp_path: Path) -> None:
    source = embedding_gemma(tmp_path / "m", **changes)
    quantised = weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    assert [warning.what[:20] for warning in quantised.warnings if "Dense" in str(warning)] == [
        "left out, 2 tensors:",
        "the file holds the m",
    ]
    path = tmp_path / "q" / "model.gguf"
    assert not [name for name in stored(path) if name.startswith("dense")]
    with weightsmith.open_checkpoint(source) as here, weightsmith.open_checkpoint(path) as back:
        assert list(back.specs) == [name for name in here.specs if "Dense" not in name]
        for name in back.specs:
            shift = np.float32(1 if "norm" in name else 0)
            assert np.array_equal(back.read(name), here.read(name) + shift - shift), name
        import transformers

        configs = [transformers.AutoConfig.from_pretrained(folder.folder) for folder in (here, back)]
    names = ("use_bidirectional_attention", "sliding_window", "layer_types", "rope_parameters", "head_dim", "hidden_size")
    assert [getattr(configs[0], name) for name in names] == [getattr(configs[1], name) for name in names]


@pytest.mark.long
def test_a_merge_of_embedding_gemma_merges_its_matrices(tmp_path: Path) -> None:
    for seed, part in enumerate("ab"):
        embedding_gemma(tmp_path / part, seed)
    models = [{"model": str(tmp_path / part), "parameters": {"weight": weight}} for part, weight in (("a", 0.3), ("b", 0.7))]
    recipe = {"merge_method": "linear", "models": models, "dtype": "float32"}
    weightsmith.merge(recipe, tmp_path / "q", quantize="gguf-q8_0", progress=False)
    weightsmith.merge(recipe, tmp_path / "plain", progress=False)
    weightsmith.quantize(tmp_path / "plain", tmp_path / "p", "gguf-q8_0", progress=False)
    assert stored(tmp_path / "q" / "model.gguf") == stored(tmp_path / "p" / "model.gguf")
    assert "dense_3.weight" in stored(tmp_path / "p" / "model.gguf")
