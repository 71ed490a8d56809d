"""Tokenizers in GGUF files of other kinds than BPE and SentencePiece's: Unigram and WordPiece of encoders, and Kimi's.

Unigram is SentencePiece's tokenizer of XLM-RoBERTa and its relatives. Each token has the logarithm of its probability, and a
text is split into the tokens that are most probable together. Characters are replaced before that by SentencePiece's own table,
which the file has as it is.

WordPiece is that of BERT. llama.cpp marks the start of a word and not its continuation: `play` is `▁play`, and `##ing` is
`ing`. Texts in brackets, such as `[CLS]`, are as they are. What tokenizer.json calls a normaliser is in llama.cpp's code, but
for two truth values.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from weightsmith._base.errors import FormatError
from weightsmith._base.files import DAMAGED, show
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.formats.gguf.tokenizer.parts import (
    TokenizerFiles,
    TokenizerKeys,
    around_values,
    is_token,
    list_of,
    numbers_of,
    object_of,
    setting,
    steps_of,
    unwritable,
)
from weightsmith._models.tokenizers.convert import bpe, replace, split
from weightsmith._models.tokenizers.vocabulary import SPACE, PieceKind, read_ranks

_UNUSED_SCORE = -10_000.0
_MOST = 3e38


def unigram_keys(files: TokenizerFiles) -> TokenizerKeys:
    """The keys of a GGUF file for a tokenizer.json with Unigram. Raises Unsupported and FormatError."""
    if files.model.get("byte_fallback"):
        raise unwritable("Unigram with a fallback to bytes")
    pairs = [_pair(entry) for entry in list_of(files.model.get("vocab"))][: files.rows]
    unknown = files.model.get("unk_id")
    if type(unknown) is not int or not 0 <= unknown < len(pairs):
        raise unwritable(f"the number of its token for unknown characters is {show(unknown)}")
    missing = files.rows - len(pairs)
    tokens = [token for token, _ in pairs] + [f"[PAD{i}]" for i in range(len(pairs), files.rows)]
    scores = [score for _, score in pairs] + [_UNUSED_SCORE] * missing
    types: list[int] = [*[PieceKind.NORMAL] * len(pairs), *[PieceKind.UNUSED] * missing]
    for entry in files.added:
        i = entry["id"]
        tokens[i], scores[i] = entry["content"], scores[i] if i < len(pairs) else 0.0
        types[i] = PieceKind.CONTROL if entry.get("special") else PieceKind.USER_DEFINED
    types[unknown] = PieceKind.UNKNOWN
    charsmap, squeezes, unsaid = _unigram_normalised(files.tokenizer)
    squeezes_too, prefixed = _splits(files.tokenizer.get("pre_tokenizer"))
    values = {"tokenizer.ggml.model": Value("str", "t5"), "tokenizer.ggml.pre": Value("str", "default")}
    values["tokenizer.ggml.scores"] = Value("f32", scores)
    values["tokenizer.ggml.add_space_prefix"] = Value("bool", prefixed)
    values["tokenizer.ggml.remove_extra_whitespaces"] = Value("bool", squeezes or squeezes_too)
    if charsmap:
        values["tokenizer.ggml.precompiled_charsmap"] = Value("u8", list(charsmap))
    values |= around_values(files, tokens, {token: i for i, (token, _) in reversed(list(enumerate(pairs)))})
    values["tokenizer.ggml.unknown_token_id"] = Value("u32", unknown)
    return TokenizerKeys(tokens, types, values, unsaid)


def unigram_parts(keys: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str) -> dict[str, Any]:
    """The parts of a tokenizer.json with Unigram. Raises FormatError."""
    scores = numbers_of(keys, "scores", 0.0, tokens, where)
    if not all(isinstance(score, float | int) and math.isfinite(score) for score in scores):
        raise FormatError("tokenizer.ggml.scores has a value that is no number", where=where, fix=DAMAGED)
    unknown = keys.get("tokenizer.ggml.unknown_token_id")
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        what = f"tokenizer.ggml.unknown_token_id is {show(unknown)}, and there are {len(tokens):,} tokens"
        raise FormatError(what, where=where, fix=DAMAGED)
    prefixed = setting(keys, "add_space_prefix", True, where)
    squeezes = setting(keys, "remove_extra_whitespaces", False, where)
    charsmap = keys.get("tokenizer.ggml.precompiled_charsmap")
    steps: list[dict[str, Any]] = []
    if isinstance(charsmap, np.ndarray) and charsmap.size:
        table = base64.b64encode(charsmap.astype(np.uint8).tobytes()).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if squeezes:
        steps.append(replace({"Regex": " {2,}"}, " "))
    mark = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always" if prefixed else "never", "split": True}
    splitters = [{"type": "WhitespaceSplit"}, mark] if squeezes else [mark]
    used = max((i + 1 for i, kind in enumerate(types) if kind != PieceKind.UNUSED), default=len(tokens))
    vocab = [[token, float(score)] for token, score in zip(tokens[:used], scores[:used], strict=True)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters} if len(splitters) > 1 else mark,
        "decoder": mark,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": False},
    }


def _pair(entry: object) -> tuple[str, float]:
    """A token and its score. Raises FormatError."""
    if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
        score = entry[1]
        if isinstance(score, int | float) and not isinstance(score, bool) and abs(score) < _MOST:
            return entry[0], float(score)
    what = f"the entry {show(entry)} of its vocabulary is not a token and its score"
    raise FormatError(what, where="tokenizer.json", fix="download it again")


def _unigram_normalised(tokenizer: Mapping[str, Any]) -> tuple[bytes, bool, list[Mapping[str, Any]]]:
    """SentencePiece's table of characters, whether spaces are squeezed, and the normalisers that llama.cpp does not have."""
    table, squeezes, others = b"", False, list[Mapping[str, Any]]()
    for step in steps_of(tokenizer.get("normalizer"), "normalizers"):
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Precompiled":
            table = _decoded(step.get("precompiled_charsmap"))
        elif kind == "Replace" and pattern == {"Regex": " {2,}"} and step.get("content") in (" ", SPACE):
            squeezes = True
        elif not (kind == "Strip" and (squeezes or step.get("strip_left"))):
            others.append(step)
    return table, squeezes, others


def _decoded(table: object) -> bytes:
    if table is None:
        return b""
    try:
        return base64.b64decode(str(table), validate=True)
    except (ValueError, binascii.Error) as error:
        raise FormatError(
            f"precompiled_charsmap is no base64: {error}", where="tokenizer.json", fix="download it again"
        ) from error


def _splits(splitter: object) -> tuple[bool, bool]:
    """Whether runs of spaces count as one, and whether a space is put before a text. Raises Unsupported."""
    steps = list(steps_of(splitter, "pretokenizers"))
    kinds = [step.get("type") for step in steps]
    if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        raise unwritable(f"it splits text by {show(splitter)}")
    mark = steps[-1]
    scheme = mark.get("prepend_scheme", "always" if mark.get("add_prefix_space", True) else "never")
    return len(kinds) > 1, scheme != "never"


# ---- WordPiece


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
    lower, stripped, unsaid = _wordpiece_normalised(files.tokenizer)
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


def _wordpiece_normalised(tokenizer: Mapping[str, Any]) -> tuple[bool, bool, list[Mapping[str, Any]]]:
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


# ---- Kimi's tokenizer, whose file has the ranks of tiktoken. Code beside it says how text is split, and names special tokens.


RANKS = "tiktoken.model"
_CODE = "tokenization_kimi."
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
KIMI_SPLIT = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How it splits text: Chinese characters are apart from other letters."""
_MOST_WORK = 10**8
"""The largest sum of the squares of the tokens' lengths. Kimi's is a tenth of it."""


def ranked_tokenizer(files: Mapping[str, bytes], rows: int) -> dict[str, Any] | None:
    """What tokenizer.json would say of Kimi's tokenizer; None for another one, or without its file.

    rows  of the embedding: those that no token is known of are reserved

    Raises FormatError for tokens of which the merges would take long to find, and for added ones without a text of their own.
    """
    settings = object_of(files, "tokenizer_config.json")
    code = settings.get("auto_map")
    code = code.get("AutoTokenizer") if isinstance(code, dict) else None
    named = [name for name in list_of(code) if isinstance(name, str)] or [code if isinstance(code, str) else ""]
    ranks = read_ranks(files[RANKS]) if RANKS in files and named[0].rpartition("--")[2].startswith(_CODE) else None
    if ranks is None:
        return None
    if sum(len(token) ** 2 for token in ranks) > _MOST_WORK:
        raise FormatError("its tokens are longer than those of any tokenizer", where=RANKS, fix=DAMAGED)
    added = {number: f"<|reserved_token_{number}|>" for number in range(len(ranks), rows)}
    listed = settings.get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        if number.isascii() and number.isdigit() and int(number[:9]) in added:
            content = entry.get("content") if isinstance(entry, dict) else None
            if not isinstance(content, str):
                what = f"token {number} of added_tokens_decoder has no content"
                raise FormatError(what, where="tokenizer_config.json", fix="repair it")
            added[int(number[:9])] = content
    for text, times in Counter([*ranks, *added.values()]).items():
        if times > 1:
            what = f"{times} tokens are {show(text)}"
            raise FormatError(what, where="tokenizer_config.json", fix="give each row of the embedding another one")
    return {
        "added_tokens": [{"id": number, "content": text, "special": True} for number, text in added.items()],
        "pre_tokenizer": split(KIMI_SPLIT),
        "model": bpe(ranks, merges_of(ranks)),
    }


def merges_of(ranks: Mapping[str, int]) -> list[list[str]]:
    """The merges with which BPE joins what tiktoken joins by rank. Cost: 3 s for 160,000 tokens.

    ranks  of tokens in the characters of byte-level BPE

    >>> merges_of({"a": 0, "b": 1, "ab": 2, "abab": 3})
    [['a', 'b'], ['ab', 'ab']]
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        parts = list(token)
        while len(parts) > 2:
            joined = [ranks.get(left + right, math.inf) for left, right in pairwise(parts)]
            best = min(joined)
            if best >= rank:
                break
            place = joined.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            merges.append(parts)
    return merges
