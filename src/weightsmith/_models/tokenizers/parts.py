"""What parts of a tokenizer.json are made of, whatever file they come from."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from weightsmith._models.tokenizers.sentencepiece import SPACE

Json = dict[str, Any]

QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen 2 splits text: a regular expression."""

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
"""Flags that most added tokens have."""

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


# ---- tokens


def _byte_characters() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: itself if it is visible in Latin-1, else one from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTES = _byte_characters()
"""Character → byte."""
CHARACTERS = {byte: character for character, byte in BYTES.items()}
"""Byte → character."""


def byte_level(data: bytes) -> str:
    """Some bytes as byte-level BPE writes them."""
    return "".join(map(CHARACTERS.__getitem__, data))


def byte_of(token: str) -> bytes | None:
    """The byte that `<0x41>` stands for; None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return None


# ---- parts


def replace(pattern: Json, content: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(*patterns: str, level: Json = BYTE_LEVEL) -> Json:
    """The pre-tokenizer that splits a text by patterns in turn, and writes it in the characters of byte-level BPE."""
    splits = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in patterns]
    return {"type": "Sequence", "pretokenizers": [*splits, level]}


def bpe(vocab: Mapping[str, int], merges: Sequence[Any], **settings: Any) -> Json:
    """A model of BPE."""
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return model | {
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": vocab,
        "merges": merges,
    }


def ways(token: str, parts: Container[str]) -> list[tuple[str, str]]:
    """The ways to put a token together from two parts."""
    return [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in parts and token[i:] in parts]


def template(single: Sequence[tuple[str, int]], pair: Sequence[tuple[str, int]], ids: Mapping[str, int]) -> Json:
    """The post-processor that puts special tokens around a text, and around two (`A` and `B`), each with its type."""

    def entry(token: str, number: int) -> Json:
        return {"Sequence" if token in ("A", "B") else "SpecialToken": {"id": token, "type_id": number}}

    special = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token, _ in single if token != "A"}
    entries = {
        "single": [entry(*token_and_type) for token_and_type in single],
        "pair": [entry(*token_and_type) for token_and_type in pair],
    }
    return {"type": "TemplateProcessing", **entries, "special_tokens": special}


def tokenizer_bytes(tokenizer: Json) -> bytes:
    """A tokenizer.json. Without indentation, Python's JSON writer is ten times as fast, and takes half the memory."""
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")).encode()


def decoders(*, prefixed: bool) -> list[Json]:
    """What makes a text of SentencePiece's pieces. prefixed: without the space that is put before a text."""
    steps = [replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    return [*steps, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else [])]


def is_merge(merge: Sequence[str], vocab: Mapping[str, int]) -> bool:
    """Whether these are two tokens that give a third."""
    return len(merge) == 2 and merge[0] in vocab and merge[1] in vocab and "".join(merge) in vocab


def first_prefix() -> dict[str, Any]:
    """The pre-tokenizer that puts a space before a text, but not after each special token in it.

    It does so before spaces too, if they are marks by then: `Metaspace` by itself leaves out the prefix of a text that begins
    with the mark, which SentencePiece and llama.cpp add. So the first one adds a plain space, and the second one marks it.
    """

    def metaspace(replacement: str, scheme: str) -> dict[str, Any]:
        return {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme, "split": False}

    return {"type": "Sequence", "pretokenizers": [metaspace(" ", "first"), metaspace(SPACE, "never")]}
