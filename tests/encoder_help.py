"""Tiny encoders with small tokenizers, as folders of transformers and of sentence-transformers."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import numpy as safetensors
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests import zoo
from tests.tokenizer_help import OTHER_TEXT, TEXT
from weightsmith._models.tokenizers.vocabulary import read_sentencepiece

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "max_position_embeddings": 66,
}
BERT_NAMES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
ROBERTA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"} | {
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
_ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


@cache  # training is not deterministic
def wordpiece(*, lower: bool = True, template: bool = True) -> Tokenizer:
    """BERT's tokenizer, of a few hundred tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT, OTHER_TEXT], trainer)
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@cache  # training is not deterministic
def unigram() -> Tokenizer:
    """XLM-RoBERTa's tokenizer, of a few dozen tokens."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(_charsmap()), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=_ROBERTA[:4], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([TEXT, OTHER_TEXT], trainer)
    tokenizer.add_special_tokens(["<mask>"])
    special = [("<s>", 0), ("</s>", 2)]
    pair = "<s> $A </s> </s> $B </s>"
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=special)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@cache  # training is not deterministic
def modern() -> Tokenizer:
    """ModernBERT's tokenizer, of a few hundred tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), list(BERT_NAMES.values())
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT, OTHER_TEXT], trainer)
    numbers = [(token, special.index(token)) for token in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=numbers)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def _charsmap() -> bytes:
    """SentencePiece's own table of characters, as XLM-RoBERTa has it."""
    import sentencepiece

    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=data,
        vocab_size=60,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    return read_sentencepiece(data.getvalue()).charsmap


@cache  # training is not deterministic
def byte_level() -> Tokenizer:
    """RoBERTa's tokenizer, of a few hundred tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=_ROBERTA, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT, OTHER_TEXT], trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save(
    model_class: str,
    config_class: str,
    tokenizer: Tokenizer,
    folder: Path,
    names: Mapping[str, str] = BERT_NAMES,
    **changes: Any,
) -> Path:
    """A model of float32 with random weights, and its tokenizer. names: tokens of special meaning"""
    arguments = {**SIZES, "vocab_size": tokenizer.get_vocab_size(), **changes}
    zoo.save_as(model_class, config_class, arguments, folder, 1, dtype="float32")
    path = folder / "model.safetensors"
    path.write_bytes(safetensors.save(_scaled(safetensors.load(path.read_bytes())), {"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return folder


def _scaled(tensors: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
    """Weights of such sizes that each part of a model changes what it computes by more than a rounding."""
    return {
        name: value + 1 if "norm" in name.lower() and name.endswith("weight") else value * (2 if value.ndim > 1 else 1)
        for name, value in tensors.items()
    }


def with_modules(folder: Path, pooling: str, *kinds: str, width: int = 32) -> Path:
    """The folder as sentence-transformers has it. pooling: its mode, `mean_tokens`; kinds: those of the modules behind it"""
    modules = []
    for i, kind in enumerate(("Transformer", "Pooling", *kinds)):
        path = f"{i}_{kind}" if i else ""
        modules.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = {"word_embedding_dimension": width, **{f"pooling_mode_{name}": name == pooling for name in _MODES}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return folder


_MODES = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")


def vectors(model_class: str, folder: Path, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """What transformers makes of some tokens: the vector of each, or the scores of the text."""
    import torch

    model, _ = zoo.load_as(model_class, folder)
    with torch.inference_mode():
        out = model(torch.tensor([list(tokens)]))
    states = out.logits if "logits" in out else out.last_hidden_state
    return np.asarray(states[0].numpy())
