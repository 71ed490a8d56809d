"""WordPiece, the tokenizer of BERT, in GGUF files.

llama.cpp marks the start of a word and not its continuation: `play` is `▁play`, and `##ing` is `ing`. Texts in brackets, such
as `[CLS]`, are as they are. What tokenizer.json calls a normaliser is in llama.cpp's code, but for two truth values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from weightsmith._base.files import show
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.formats.gguf.tokenizer_parts import (
    TokenizerFiles,
    TokenizerKeys,
    around_values,
    is_token,
    setting,
    steps_of,
    unwritable,
)
from weightsmith._models.tokenizers.vocabulary import SPACE, PieceKind

_INSIDE = "##"
_PAD = re.compile(r"\[PAD[0-9]+\]")


def wordpiece_keys(files: TokenizerFiles) -> TokenizerKeys:
    """The keys of a GGUF file for a tokenizer.json with WordPiece. Raises Unsupported for one that llama.cpp does not have."""
    vocab = {token: number for token, number in files.model["vocab"].items() if is_token(number, token) and number < files.rows}
    if (prefix := files.model.get("continuing_subword_prefix", _INSIDE)) != _INSIDE:
        raise unwritable(f"continuations of words begin with {show(prefix)}, not with ##")
    splitters = [step.get("type") for step in steps_of(files.tokenizer.get("pre_tokenizer"), "pretokenizers")]
    if splitters != ["BertPreTokenizer"]:
        raise unwritable(f"it splits text by {show(files.tokenizer.get('pre_tokenizer'))}")
    if (unknown := files.model.get("unk_token")) not in vocab:
        raise unwritable(f"its token for unknown words is {show(unknown)}, which has no number")
    tokens = [f"[PAD{i}]" for i in range(files.rows)]
    types: list[int] = [PieceKind.UNUSED] * files.rows
    for token, number in vocab.items():
        tokens[number], types[number] = _marked(token), PieceKind.NORMAL
    for entry in files.added:
        tokens[entry["id"]] = entry["content"]
        types[entry["id"]] = PieceKind.CONTROL if entry.get("special") else PieceKind.USER_DEFINED
    lower, stripped, unsaid = _normalised(files.tokenizer)
    values = {"tokenizer.ggml.model": Value("str", "bert"), "tokenizer.ggml.pre": Value("str", "default")}
    values |= {"tokenizer.ggml.normalizer.lowercase": Value("bool", lower)}
    values |= {"tokenizer.ggml.normalizer.strip_accents": Value("bool", stripped)}
    values |= around_values(files, tokens, vocab)
    values["tokenizer.ggml.unknown_token_id"] = Value("u32", vocab[unknown])
    return TokenizerKeys(tokens, types, values, unsaid)


def wordpiece_parts(keys: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str) -> dict[str, Any]:
    """The parts of a tokenizer.json with WordPiece."""
    vocab = {}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != PieceKind.UNUSED or not _PAD.fullmatch(token):
            vocab[token if kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED) else _unmarked(token)] = i
    lower = setting(keys, "normalizer.lowercase", True, where)
    stripped = setting(keys, "normalizer.strip_accents", lower, where)
    unknown = keys.get("tokenizer.ggml.unknown_token_id")
    name = tokens[unknown] if type(unknown) is int and unknown < len(tokens) else "[UNK]"
    settings = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None if stripped == lower else stripped}
    rules = {"unk_token": name, "continuing_subword_prefix": _INSIDE, "max_input_chars_per_word": 100}
    return {
        "normalizer": {"type": "BertNormalizer", **settings, "lowercase": lower},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": _INSIDE, "cleanup": True},
        "model": {"type": "WordPiece", **rules, "vocab": vocab},
    }


def _marked(token: str) -> str:
    """A token as llama.cpp has it.

    >>> _marked("play"), _marked("##ing"), _marked("[CLS]")
    ('▁play', 'ing', '[CLS]')
    """
    if token.startswith("[") and token.endswith("]"):
        return token
    return token.removeprefix(_INSIDE) if token.startswith(_INSIDE) else SPACE + token


def _unmarked(token: str) -> str:
    """The reverse of `_marked`."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token.removeprefix(SPACE) if token.startswith(SPACE) else _INSIDE + token


def _normalised(tokenizer: Mapping[str, Any]) -> tuple[bool, bool, list[Mapping[str, Any]]]:
    """Whether letters become small, whether accents are removed, and the normalisers that llama.cpp does not have."""
    lower = stripped = False
    others: list[Mapping[str, Any]] = []
    for step in steps_of(tokenizer.get("normalizer"), "normalizers"):
        kind = step.get("type")
        if kind == "BertNormalizer":
            lower = bool(step.get("lowercase", True))
            stripped = lower if step.get("strip_accents") is None else bool(step["strip_accents"])
            if not (step.get("clean_text", True) and step.get("handle_chinese_chars", True)):
                others.append({"type": "BertNormalizer without clean_text or handle_chinese_chars"})
        elif kind in ("Lowercase", "StripAccents"):
            lower, stripped = lower or kind == "Lowercase", stripped or kind == "StripAccents"
        elif kind != "NFD":
            others.append(step)
    return lower, stripped, others
