"""Encoders as GGUF files: what llama.cpp, transformers and sentence-transformers make of them, and what comes back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

import weightsmith
from tests import encoder_help, llama_cpp
from tests.encoder_help import BERT_NAMES, ROBERTA_NAMES, byte_level, modern, unigram, vectors, with_modules, wordpiece
from tests.gguf_help import stored
from tests.llama_cpp import needs_llama_cpp
from tests.mini import write_checkpoint
from tests.tokenizer_help import SAMPLES
from weightsmith._base.errors import FormatError, PlanError
from weightsmith._models.formats.gguf.architectures.bert import BertRanks, XlmRoberta
from weightsmith._models.formats.gguf.base.architecture import Contents
from weightsmith._models.formats.gguf.base.values import GgufValues
from weightsmith._models.formats.gguf.header import read_gguf_header
from weightsmith._models.formats.gguf.tokenizer.files import tokenizer_files as gguf_tokenizer_files

LABELS = {"id2label": {0: "no", 1: "perhaps", 2: "yes"}, "label2id": {"no": 0, "perhaps": 1, "yes": 2}}
DEFAULT = {"rope_type": "default"}
EURO = {"num_key_value_heads": 2, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "mask_token_id": 4}
MODERN: dict[str, Any] = {"num_hidden_layers": 5, "local_attention": 16, "pad_token_id": 2}
MODERN |= {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 1, "sep_token_id": 1}
MODERN |= {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
    }
}
ENCODERS: dict[str, tuple[str, str, Callable[[], Tokenizer], dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", wordpiece, {}),
    "bert-cased": ("BertModel", "BertConfig", lambda: wordpiece(lower=False), {}),
    "bert-ranks": ("BertForSequenceClassification", "BertConfig", wordpiece, {"num_labels": 1}),
    "bert-classes": ("BertForSequenceClassification", "BertConfig", wordpiece, LABELS),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        wordpiece,
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    "roberta": ("RobertaModel", "RobertaConfig", byte_level, {"pad_token_id": 1}),
    "roberta-ranks": ("RobertaForSequenceClassification", "RobertaConfig", byte_level, {"num_labels": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", unigram, {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta-ranks": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", unigram, {"num_labels": 1}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", modern, MODERN),
    "modernbert-silu": ("ModernBertModel", "ModernBertConfig", modern, {**MODERN, "hidden_activation": "silu"}),
    "nomic": ("NomicBertModel", "NomicBertConfig", wordpiece, {"rope_parameters": {**DEFAULT, "rope_theta": 700.0}}),
    "jina": ("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", unigram, {"rope_parameters": {**DEFAULT, "rope_theta": 700.0}}),
    "eurobert": ("EuroBertModel", "EuroBertConfig", modern, EURO),
    "modernbert-ranks": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        modern,
        {**MODERN, "classifier_pooling": "mean", "num_labels": 1},
    ),
}
MODULES = {
    "modernbert-ranks": "model.",
    "bert-ranks": "bert.",
    "bert-classes": "bert.",
    "roberta-ranks": "roberta.",
    "xlm-roberta-ranks": "roberta.",
}
HEADS = ("pooler.dense", "classifier")
"""llama.cpp's converter leaves BERT's pooler out, with which transformers computes scores, and renames its classifier."""
TEXTS = ["The lazy dog", "Numbers: 12", " two  spaces"]
MAPS = {"modernbert": "MODERN_BERT", "nomic": "NOMIC_BERT", "jina": "JINA_BERT_V3", "eurobert": "EUROBERT"}


def save(name: str, folder: Path) -> Path:
    model_class, config_class, tokenizer, changes = ENCODERS[name]
    named = ROBERTA_NAMES if tokenizer in (unigram, byte_level) else BERT_NAMES
    return encoder_help.save(model_class, config_class, tokenizer(), folder, named, **changes)


def quantize(source: Path, out: Path, name: str = "f32", **options: Any) -> Path:
    weightsmith.quantize(source, out, f"gguf-{name}", progress=False, **options)
    return out / "model.gguf"


def keys_of(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.mark.matrix("bert")
@needs_llama_cpp
@pytest.mark.parametrize("name", ENCODERS)
def test_llama_cpp_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    source = save(name, tmp_path / "m")
    path = quantize(source, tmp_path / "q")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    with llama_cpp.Judge(path) as judge:
        for text in SAMPLES:
            if tokens := tokenizer.encode(text).ids[:50]:
                theirs = vectors(ENCODERS[name][0], source, tokens)
                ours = judge.pooled(tokens) if theirs.ndim == 1 else judge.vectors(tokens)
                # llama.cpp's GELU is an approximation, and its attention rounds to float16
                assert np.abs(ours - theirs).max() < 1e-2 * max(1, np.abs(theirs).max())


@pytest.mark.long
@needs_llama_cpp
@pytest.mark.parametrize("name", ENCODERS)
def test_llama_cpp_splits_text_into_the_same_tokens(name: str, tmp_path: Path) -> None:
    source = save(name, tmp_path / "m")
    path = quantize(source, tmp_path / "q")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    with llama_cpp.Judge(path) as judge:
        assert [judge.tokens(text, around=True) for text in SAMPLES] == [tokenizer.encode(text).ids for text in SAMPLES]


@pytest.mark.long
@needs_llama_cpp
@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens", "lasttoken"])
@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_llama_cpp_pools_as_sentence_transformers_does(name: str, pooling: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    source = with_modules(save(name, tmp_path / "m"), pooling, "Normalize")
    quantised = weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    assert not any("modules" in str(warning) for warning in quantised.warnings)
    theirs = SentenceTransformer(str(source), device="cpu").encode(TEXTS)
    with llama_cpp.Judge(tmp_path / "q" / "model.gguf") as judge:
        for text, expected in zip(TEXTS, theirs, strict=True):
            ours = judge.pooled(judge.tokens(text, around=True))
            assert np.abs(ours / np.linalg.norm(ours) - expected).max() < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("name", ENCODERS)
def test_what_comes_back_is_what_was_written(name: str, tmp_path: Path) -> None:
    source = save(name, tmp_path / "m")
    path = quantize(source, tmp_path / "q")
    known, written = gguf.get_tensor_name_map(gguf.MODEL_ARCH[MAPS.get(name.partition("-")[0], "BERT")], 8), stored(path)
    with weightsmith.open_checkpoint(source) as here, weightsmith.open_checkpoint(tmp_path / "q") as back:
        expected = [spec for spec in here.specs if "ranks" in name or "classes" in name or not spec.startswith("pooler.")]
        assert list(back.specs) == expected
        for tensor in back.specs:
            plain, read = here.read(tensor), back.read(tensor)
            if "roberta" in name and tensor.endswith("position_embeddings.weight"):
                assert not read[:2].any()
                plain, read = plain[2:], read[2:]
            assert np.array_equal(plain, read), tensor
            module, _, kind = tensor.removeprefix(MODULES.get(name, "")).rpartition(".")
            assert module in HEADS or f"{known.get_name(module)}.{kind}" in written
        before, after = here.config or {}, back.config or {}
        unlike = ("transformers_version", "initializer_range", "use_cache", "attention_probs_dropout_prob")
        unlike += ("hidden_dropout_prob", "classifier_dropout", "dropout", "attention_dropout", "qa_dropout")
        unlike += ("seq_classif_dropout", "problem_type", "sinusoidal_pos_embds")
        unlike += (
            "cls_token_id",
            "sep_token_id",
            "pretraining_tp",
            "decoder_bias",
            "embedding_dropout",
            "mlp_dropout",
            "sparse_prediction",
        )
        unlike += ("sparse_pred_ignore_index", "deterministic_flash_attn", "initializer_cutoff_factor")
        unlike += ("head_dim",) if name == "nomic" else ()
        if name == "eurobert":
            unlike += ("rope_parameters",)
            assert after["rope_theta"] == before["rope_parameters"]["rope_theta"]
        unlike += () if name.endswith("ranks") else ("classifier_activation", "classifier_bias", "classifier_pooling")
        unlike += tuple(encoder_help.SIZES)[:4] if name == "distilbert" else ()  # it has other names of them
        for key, value in before.items():
            if key not in unlike and value is not None:
                actual = after.get(key, value if key == "is_decoder" else None)
                assert actual == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
        texts = [json.loads((Path(folder) / "tokenizer.json").read_text()) for folder in (source, back.folder)]
    ours, theirs = (Tokenizer.from_str(json.dumps(text)) for text in texts)
    for text in SAMPLES:
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.encode(text, "a dog").ids == theirs.encode(text, "a dog").ids
        assert ours.encode(text, "a dog").type_ids == theirs.encode(text, "a dog").type_ids


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens"])
def test_how_a_file_pools_comes_back(pooling: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    source = with_modules(save("bert", tmp_path / "m"), pooling)
    path = quantize(source, tmp_path / "q")
    back = weightsmith.dequantize(path, tmp_path / "back", progress=False)
    assert not back.plan.lacking
    vectors_of = [SentenceTransformer(str(folder), device="cpu").encode(TEXTS) for folder in (source, tmp_path / "back")]
    assert np.array_equal(*vectors_of)
    again = keys_of(quantize(path, tmp_path / "again", "q8_0"))
    assert again["bert.pooling_type"] == keys_of(path)["bert.pooling_type"]


@pytest.mark.long
def test_nomics_published_settings_are_those_of_transformers(tmp_path: Path) -> None:
    source = save("nomic", tmp_path / "m")
    plain = stored(quantize(source, tmp_path / "a")), keys_of(tmp_path / "a" / "model.gguf")
    config = json.loads((source / "config.json").read_text())
    published = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_inner": 48, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 700}
    published |= {"activation_function": "swiglu", "prenorm": False, "rotary_emb_fraction": 1.0, "rotary_scaling_factor": None}
    published |= {"n_positions": 8192, "max_trained_positions": 66, "rotary_emb_scale_base": None}
    kept = ("architectures", "model_type", "vocab_size", "type_vocab_size", "pad_token_id")
    published |= {name: config[name] for name in kept}
    (source / "config.json").write_text(json.dumps(published))
    assert (stored(quantize(source, tmp_path / "b")), keys_of(tmp_path / "b" / "model.gguf")) == plain
    for changes, words in (({"parallel_block": True}, "parallel_block is True"), ({"prenorm": True}, "prenorm is True")):
        (source / "config.json").write_text(json.dumps({**published, **changes}))
        with pytest.raises(PlanError, match=words):
            quantize(source, tmp_path / "c")


# ---- what is left out, and what is refused


def test_heads_that_llama_cpp_does_not_have_are_named(tmp_path: Path) -> None:
    source = encoder_help.save("BertForMaskedLM", "BertConfig", wordpiece(), tmp_path / "m")
    quantised = weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    assert [str(warning) for warning in quantised.warnings if "masked" in str(warning)]
    reasons = {tensor.reason for tensor in quantised.plan.dropped}
    assert reasons == {"the head that predicts masked tokens"}
    bare = encoder_help.save("BertModel", "BertConfig", wordpiece(), tmp_path / "bare")
    quantised = weightsmith.quantize(bare, tmp_path / "bare-q", "gguf-f32", progress=False)
    assert [warning.what for warning in quantised.warnings if "pooler" in str(warning)] == [
        "left out, 2 tensors: the pooler: llama.cpp takes the vectors of tokens"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', and llama.cpp takes 'gelu' for granted"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"1": "a"}}, "id2label is"),
        ({"type_vocab_size": "x"}, "type_vocab_size is 'x'"),
    ],
)
def test_settings_that_llama_cpp_does_not_know(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = save("bert", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q")


def test_a_head_pools_as_transformers_does_by_default(tmp_path: Path) -> None:
    source = save("modernbert-ranks", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    del config["classifier_pooling"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=r"classifier_pooling is 'cls', and llama\.cpp takes 'mean' for granted"):
        quantize(source, tmp_path / "q")


@pytest.mark.long
def test_jinas_rope_has_the_base_of_transformers_by_default(tmp_path: Path) -> None:
    source = save("jina", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    (source / "config.json").write_text(json.dumps(config))
    assert keys_of(quantize(source, tmp_path / "q"))["jina-bert-v3.rope.freq_base"] == 20_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_labels": 30_000_000, "id2label": None}, "num_labels is 30000000, more than 100,000"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "has names of 3 scores in id2label or num_labels, and the head has 1"),
        ({"max_position_embeddings": 16}, "position_embeddings.weight: max_position_embeddings is 16 in config.json, and this"),
        ({"intermediate_size": 16}, "intermediate.dense.weight: intermediate_size is 16 in config.json, and blk.0.ffn_up"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, and there are tensors of 2 layers: layer 1 is not one of those"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, and there are tensors of 2 layers: layer 2 is missing"),
    ],
)
def test_tensors_that_contradict_config_json(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = save("bert-ranks", tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q")


def test_a_head_with_another_activation_is_refused(tmp_path: Path) -> None:
    sizes = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    source = encoder_help.save("DistilBertForSequenceClassification", "DistilBertConfig", wordpiece(), tmp_path / "m", **sizes)
    with pytest.raises(PlanError, match="the activation in the head of DistilBertForSequenceClassification is 'relu'"):
        quantize(source, tmp_path / "q")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("model", "continuing_subword_prefix"), "@@", "continuations of words begin with '@@'"),
        (("model", "unk_token"), "[X]", "its token for unknown words is '\\[X\\]'"),
        (("pre_tokenizer",), {"type": "Whitespace"}, "it splits text by"),
        (("post_processor",), None, "it puts \\[\\] around a text"),
        (("model", "type"), "WordLevel", "a model of the type 'WordLevel'"),
    ],
)
def test_tokenizers_that_llama_cpp_does_not_have(path: tuple[str, ...], value: Any, words: str, tmp_path: Path) -> None:
    source = save("bert", tmp_path / "m")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    inner = tokenizer
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("model", "unk_id"), 9999, "the number of its token for unknown characters is 9999"),
        (("model", "byte_fallback"), True, "Unigram with a fallback to bytes"),
        (("model", "vocab"), [["a", "b"]] * 9, "the entry \\['a', 'b'\\] of its vocabulary is not a token and its score"),
        (("pre_tokenizer",), {"type": "Whitespace"}, "it splits text by"),
        (("normalizer",), {"type": "Precompiled", "precompiled_charsmap": "?"}, "precompiled_charsmap is no base64"),
    ],
)
def test_unigrams_that_llama_cpp_does_not_have(path: tuple[str, ...], value: Any, words: str, tmp_path: Path) -> None:
    source = save("xlm-roberta", tmp_path / "m")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    inner = tokenizer
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PlanError, match=words):
        quantize(source, tmp_path / "q")


def test_normalisers_that_llama_cpp_does_not_have_are_named(tmp_path: Path) -> None:
    source = save("bert", tmp_path / "m")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "NFD"}, {"type": "Lowercase"}]}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    quantised = weightsmith.quantize(source, tmp_path / "q", "gguf-f32", progress=False)
    assert [warning.what for warning in quantised.warnings if "normalizer" in str(warning)] == [
        "llama.cpp splits some texts otherwise than transformers, which a GGUF file cannot say: 'e\\u0301' (normalizer NFKC)"
    ]
    keys = keys_of(tmp_path / "q" / "model.gguf")
    assert keys["tokenizer.ggml.normalizer.lowercase"] is True
    assert keys["tokenizer.ggml.normalizer.strip_accents"] is False


# ---- types, and merges


@pytest.mark.long
@pytest.mark.matrix("bert-*")
@needs_llama_cpp
@pytest.mark.parametrize("name", ["bert-ranks", "xlm-roberta"])
def test_types_and_bytes_are_those_of_llama_cpps_quantiser(name: str, tmp_path: Path) -> None:
    model_class, config_class, tokenizer, changes = ENCODERS[name]
    named = ROBERTA_NAMES if "roberta" in name else BERT_NAMES
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    source = encoder_help.save(model_class, config_class, tokenizer(), tmp_path / "m", named, **changes, **sizes)
    plain = quantize(source, tmp_path / "f32")
    for mixture, number in (("q4_k_m", 15), ("q8_0", 7)):
        ours = stored(quantize(source, tmp_path / mixture, mixture))
        assert llama_cpp.quantize(plain, tmp_path / "theirs.gguf", number)
        theirs = stored(tmp_path / "theirs.gguf")  # in which a matrix of one row is a vector
        assert {tensor: (kind, data) for tensor, (kind, _, data) in ours.items()} == {
            tensor: (kind, data) for tensor, (kind, _, data) in theirs.items()
        }


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_a_merge_straight_to_gguf_is_the_merge_then_quantised(name: str, tmp_path: Path) -> None:
    for seed, part in enumerate(("a", "b", "c")):
        source = save(name, tmp_path / part)
        if seed:
            with weightsmith.open_checkpoint(source) as checkpoint:
                tensors = {tensor: checkpoint.read(tensor) + np.float32(0.01 * seed) for tensor in checkpoint.specs}
                config = checkpoint.config or {}
            write_checkpoint(source, tensors, config)
    models = [{"model": str(tmp_path / part), "parameters": {"weight": 0.7, "density": 0.5}} for part in "bc"]
    recipe = {"merge_method": "dare_ties", "base_model": str(tmp_path / "a"), "models": models, "dtype": "float32"}
    weightsmith.merge(recipe, tmp_path / "q", quantize="gguf-q8_0", progress=False)
    weightsmith.merge(recipe, tmp_path / "plain", progress=False)
    assert stored(tmp_path / "q" / "model.gguf") == stored(quantize(tmp_path / "plain", tmp_path / "p", "q8_0"))


# ---- files that contradict themselves


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("scores", math.nan, "tokenizer.ggml.scores has a value that is no number"),
        ("unknown_token_id", 999_999, "tokenizer.ggml.unknown_token_id is 999999"),
    ],
)
def test_damaged_unigrams(key: str, value: float, words: str, tmp_path: Path) -> None:
    keys = dict(read_gguf_header(quantize(save("xlm-roberta", tmp_path / "m"), tmp_path / "q")).keys)
    tokens = keys["tokenizer.ggml.tokens"]
    keys[f"tokenizer.ggml.{key}"] = np.full(len(tokens), value, np.float32) if key == "scores" else value
    with pytest.raises(FormatError, match=words):
        gguf_tokenizer_files(keys, XlmRoberta(), "x.gguf")


def test_a_head_of_more_scores_than_there_can_be() -> None:
    values = GgufValues({}, "x.gguf", "download it again", "bert.")
    shapes = {"token_types.weight": (2, 4), "cls.output.weight": (1 << 40, 1)}
    with pytest.raises(FormatError, match="a head of 1,099,511,627,776 scores, and at most 100,000 are read"):
        BertRanks().take_more(values, {}, Contents(shapes))
