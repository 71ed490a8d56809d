"""Small tokenizers of every family, trained by the package `tokenizers`, which is the judge of what weightsmith writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox runs away, over hills and through fields. "
    "Numbers such as 12, 345 and 6789 are split. Größe, naïve, 東京, emoji 🦊 and tabs\tare text too.\n\n"
    "def add(a, b):\n    return a + b\n"
)
OTHER_TEXT = (
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Der Hund schläft, und der Fuchs läuft davon.\n"
    "class Fox:\n\tpass  # 1 2 3\n"
)
SAMPLES = [
    *TEXT.split(". "),
    *OTHER_TEXT.split(". "),
    *(" leading", "two  spaces", "trailing ", "\n\n\n", "<b>html</b>", "a<|b|>c", "", "mixed東京text"),
]


@cache
def _trained(family: str, text: str, size: int) -> str:
    if family == "byte-level BPE":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    elif family == "SentencePiece BPE":
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        trainer = trainers.BpeTrainer(vocab_size=size + 150, special_tokens=["<unk>", *bytes_], show_progress=False)
    elif family == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    if family == "SentencePiece BPE":
        data = json.loads(tokenizer.to_str())
        data["added_tokens"] = [entry for entry in data["added_tokens"] if not entry["content"].startswith("<0x")]
        return json.dumps(data)
    return str(tokenizer.to_str())


def trained(
    family: str = "byte-level BPE", special: Sequence[str] = ("<s>", "</s>"), *, text: str = TEXT, size: int = 320
) -> Tokenizer:
    """A tokenizer of a family; `special` tokens are added at the end."""
    tokenizer = Tokenizer.from_str(_trained(family, text, size))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def files(tokenizer: Tokenizer, **settings: Any) -> dict[str, bytes]:
    """Its files. settings: of tokenizer_config.json"""
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **settings}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(about).encode()}


def write(folder: Path, content: Mapping[str, bytes]) -> None:
    """Write files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, without the special tokens around it."""
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
