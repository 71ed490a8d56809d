"""tokenizer.json from older files: SentencePiece models, tekken.json, vocab.json with merges.txt, vocab.txt.

Tokens can only be added to a tokenizer.json. It must encode text as the older files do. So whatever they do not say is refused
and not guessed: the rule that splits text, and special tokens that are named in code.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsmith._base.errors import Unsupported
from weightsmith._models.tokenizers.vocabulary import (
    SPACE,
    PieceKind,
    SentencePiece,
    Vocabulary,
    json_object,
    main_file,
    read_sentencepiece,
)

# ---- What parts of a tokenizer.json are made of, whatever file they come from


Json = dict[str, Any]

QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen 2 splits text: a regular expression."""

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
"""Flags that most added tokens have."""

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


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
    return [(first, token[i:]) for i in range(1, len(token)) if (first := token[:i]) in parts and token[i:] in parts]


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


NEVER = 1e4
"""Subtracted from the score of a unigram piece that no text gives: far below the sum of the scores of its characters."""

REPLACED = frozenset({"vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json"})
"""Files that a new tokenizer.json replaces. llama.cpp reads tokenizer.model, with added_tokens.json."""

_LLAMA = frozenset({"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"})
_BERT = frozenset({"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"})
_GPT2 = frozenset({"GPT2Tokenizer", "CodeGenTokenizer"})
_QWEN2 = frozenset({"Qwen2Tokenizer"})
_ANY = frozenset({"", "PreTrainedTokenizer", "TokenizersBackend"})

_FIX = "make one: AutoTokenizer.from_pretrained(folder).save_pretrained(folder), and compare what both make of a text"


@dataclass(frozen=True, slots=True)
class Converted:
    """A tokenizer.json, and what tokenizer_config.json has to say with it.

    source  the file that it was made from
    roles   `bos`, `unk` and so on → special token: those that classes of transformers imply
    """

    source: str
    tokenizer: Json
    roles: Mapping[str, str]

    @property
    def data(self) -> bytes:
        """The file."""
        return tokenizer_bytes(self.tokenizer)

    def settings(self, listed: Mapping[str, Any]) -> Json:
        """tokenizer_config.json. listed: its entries so far"""
        named = {f"{role}_token": token for role, token in self.roles.items()}
        # Other classes of transformers 5 keep the tokens of tokenizer.json and replace how it splits text.
        return {**named, **listed, "tokenizer_class": "PreTrainedTokenizerFast"}


def convert(vocabulary: Vocabulary, data: Mapping[str, bytes]) -> Converted:
    """The tokenizer.json of a tokenizer without one.

    data  the files of the tokenizer, by name; see `contents_of`

    Merges of SentencePiece models and of ranks follow from the scores: each way to put a piece together is a merge, and pieces
    with higher scores come first. The results differ from SentencePiece's only for texts with equally probable unigram pieces,
    after tokens that the model itself defines, if it adds a space, and if `legacy` is false for texts that begin with a
    character that normalisation removes: they get no space before them.

    Raises Unsupported.

    Cost: 1 to 3 s for 130,000 pieces.
    """
    name = main_file(data)
    settings = _object(data, "tokenizer_config.json", vocabulary)
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if settings.get("auto_map"):
        raise _refused(vocabulary, name, "the model has code of its own for it")
    if unknown := [token for token in _named(settings).values() if token not in vocabulary.ids]:
        raise _refused(vocabulary, name, f"{unknown[0]!r} in tokenizer_config.json has no id")
    if name == "vocab.json":
        return _byte_level(vocabulary, data, settings, kind)
    if name == "vocab.txt":
        return _wordpiece(vocabulary, settings, kind)
    if name == "tekken.json":
        return _tekken(vocabulary, data)
    if vocabulary.family == "byte-level BPE":
        raise _refused(vocabulary, name, "its special tokens and the rule that splits text are not in the file")
    return _sentencepiece(vocabulary, read_sentencepiece(data[name]), settings, kind, name)


def _refused(vocabulary: Vocabulary, name: str, why: str) -> Unsupported:
    what = f"there is no tokenizer.json, and {name} cannot be converted to one: {why}"
    return Unsupported(what, where=vocabulary.label, fix=_FIX)


def _expect(vocabulary: Vocabulary, name: str, kind: str, known: frozenset[str]) -> None:
    if kind not in known | _ANY:
        raise _refused(vocabulary, name, f"what {kind} does with it is not in the file")


def _object(data: Mapping[str, bytes], name: str, vocabulary: Vocabulary) -> Json:
    return json_object(data[name], vocabulary.label, name) if name in data else {}


def _named(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens of tokenizer_config.json by role."""
    token_of_role = {}
    for key, value in settings.items():
        token = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(token, str) and token:
            token_of_role[key.removesuffix("_token")] = token
    return token_of_role


def _converted(
    vocabulary: Vocabulary, name: str, model: Json, parts: Json, roles: Mapping[str, str], settings: Mapping[str, Any]
) -> Converted:
    """A tokenizer.json with the vocabulary's added tokens, and those of its roles."""
    added = {token: {**_ADDED, **entry} for token, entry in vocabulary.added.items()}
    roles = {role: token for role, token in roles.items() if token in vocabulary.ids}
    for token in (*roles.values(), *_named(settings).values()):
        if token in vocabulary.ids:
            added[token] = {**_ADDED, "content": token, **added.get(token, {}), "id": vocabulary.ids[token], "special": True}
    listed = sorted(added.values(), key=lambda entry: entry["id"])
    keys = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None, **parts}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": listed, **keys, "model": model}
    return Converted(name, tokenizer, roles)


_ADDED = {**FLAGS, "special": False}


# ---- parts of a tokenizer.json


def _sequence(parts: Sequence[Json], name: str) -> Json | None:
    return {"type": "Sequence", name: list(parts)} if len(parts) > 1 else next(iter(parts), None)


def _around(vocabulary: Vocabulary, before: str, after: str) -> Json | None:
    """BOS before each text and EOS after it; "" for neither."""
    one = [(token, 0) for token in (before, "A", after) if token]
    two = [(token, number) for token, number in ((before, 0), ("B", 1), (after, 1)) if token]
    return template(one, one + two, vocabulary.ids) if before or after else None


def _merges(pieces: Sequence[str]) -> list[str]:
    """All ways to put each piece together from two others, the pieces in the order of their ranks."""
    parts = frozenset(pieces)
    return [f"{first} {second}" for piece in pieces for first, second in ways(piece, parts)]


# ---- kinds of files


def _sentencepiece(
    vocabulary: Vocabulary, model: SentencePiece, settings: Mapping[str, Any], kind: str, name: str
) -> Converted:
    _expect(vocabulary, name, kind, _LLAMA)
    prefix = model.prefix and settings.get("add_prefix_space") is not False
    first = prefix and settings.get("legacy") is False  # a space before the whole text only, not after each special token
    if model.bpe is None or not model.escape or model.suffix:
        raise _refused(vocabulary, name, "it is a SentencePiece model of words or characters, or writes spaces in another way")
    defined = [piece.text for piece in model.pieces if piece.kind == PieceKind.USER_DEFINED]
    if prefix and any(SPACE in text for text in defined):
        raise _refused(vocabulary, name, "it adds a space before a text, and defines tokens of spaces")
    if model.bpe and any(piece.kind == PieceKind.UNUSED for piece in model.pieces):
        raise _refused(vocabulary, name, "it has pieces that are marked as unused")
    steps: list[Json] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    pre = first_prefix() if first else None
    if model.squeeze:  # Strip would take line breaks too
        # The space that `first_prefix` finds at the start of a text is its prefix.
        steps += [replace({"Regex": r" +\z" if first else r"\A +| +\z"}, ""), replace({"Regex": " {2,}"}, " ")]
    if not first:
        steps += [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    if not (first and model.squeeze):
        steps.append(replace({"String": " "}, SPACE))
    roles = {role: model.pieces[number].text for role, number in model.roles.items()}
    ends = roles | _named(settings)
    bos = ends.get("bos", "") if settings.get("add_bos_token") is not False else ""
    eos = ends.get("eos", "") if settings.get("add_eos_token") is True else ""
    parts = {
        "normalizer": _sequence(steps, "normalizers"),
        "pre_tokenizer": pre,
        "post_processor": _around(vocabulary, bos, eos),
        "decoder": _sequence(decoders(prefixed=prefix), "decoders"),
    }
    converted = _converted(vocabulary, name, _pieces(model), parts, roles, settings)
    for entry in converted.tokenizer["added_tokens"]:
        if SPACE in entry["content"] and entry["content"] in defined:  # found after spaces have become marks
            entry["normalized"] = True
    return converted


def _pieces(model: SentencePiece) -> Json:
    """The model of a tokenizer.json with the pieces."""
    if not model.bpe:
        lowest = min(piece.score for piece in model.pieces) - NEVER
        vocab = [[p.text, p.score if p.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED) else lowest] for p in model.pieces]
        return {"type": "Unigram", "unk_id": model.roles.get("unk"), "vocab": vocab, "byte_fallback": model.byte_fallback}
    # SentencePiece merges pairs of equal score from left to right. A longer piece before a shorter one does the same with runs
    # of spaces, whose pieces have equal scores in many models.
    normal = [piece for piece in model.pieces if piece.kind == PieceKind.NORMAL]
    ranked = sorted(normal, key=lambda piece: (-piece.score, -len(piece.text)))
    unknown = next((piece.text for piece in model.pieces if piece.kind == PieceKind.UNKNOWN), None)
    return bpe(
        model.ids,
        _merges([piece.text for piece in ranked]),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _byte_level(vocabulary: Vocabulary, data: Mapping[str, bytes], settings: Mapping[str, Any], kind: str) -> Converted:
    _expect(vocabulary, "vocab.json", kind, _GPT2 | _QWEN2)
    if "merges.txt" not in data:
        raise _refused(vocabulary, "vocab.json", "there is no merges.txt")
    lines = data["merges.txt"].decode("utf-8", "replace").splitlines()
    merges = [line for line in lines if line.count(" ") == 1 and not line.startswith("#version")]
    vocab = {token: number for token, number in vocabulary.ids.items() if token not in vocabulary.added}
    vocab |= _object(data, "vocab.json", vocabulary)
    if any(not is_merge(merge.split(" "), vocab) for merge in merges):
        raise _refused(vocabulary, "vocab.json", "merges.txt has tokens that it lacks")
    roles = {role: "<|endoftext|>" for role in ("bos", "eos", "unk")}
    spaced = settings.get("add_prefix_space") is True
    if kind in _QWEN2:
        parts: Json = {"normalizer": {"type": "NFC"}, "pre_tokenizer": split(QWEN2_SPLIT)}
        roles = {role: roles["eos"] for role in ("eos", "pad")}
        if spaced:
            raise _refused(vocabulary, "vocab.json", "it adds a space before a text")
    else:
        parts = {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": spaced, "use_regex": True}}
    parts |= {"decoder": BYTE_LEVEL, "post_processor": BYTE_LEVEL}
    if settings.get("add_bos_token") is True:
        bos = _named(settings).get("bos", roles.get("bos", ""))
        parts["post_processor"] = _around(vocabulary, bos if bos in vocabulary.ids else "", "")
    return _converted(vocabulary, "vocab.json", bpe(vocab, merges), parts, roles, settings)


def _wordpiece(vocabulary: Vocabulary, settings: Mapping[str, Any], kind: str) -> Converted:
    _expect(vocabulary, "vocab.txt", kind, _BERT)
    roles = {role: f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")} | _named(settings)
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": settings.get("tokenize_chinese_chars") is not False,
        "strip_accents": settings.get("strip_accents"),
        "lowercase": settings.get("do_lower_case") is not False,
    }
    if any(roles[role] not in vocabulary.ids for role in ("unk", "cls", "sep")):
        raise _refused(vocabulary, "vocab.txt", "it has no [UNK], [CLS] or [SEP]")
    sep = roles["sep"]
    one = [(roles["cls"], 0), ("A", 0), (sep, 0)]
    model = {"type": "WordPiece", "unk_token": roles["unk"], "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    parts = {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template(one, [*one, ("B", 1), (sep, 1)], vocabulary.ids),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }
    vocab = {
        token: number for token, number in vocabulary.ids.items() if token not in vocabulary.added or token in roles.values()
    }
    return _converted(vocabulary, "vocab.txt", {**model, "vocab": vocab}, parts, roles, settings)


def _tekken(vocabulary: Vocabulary, data: Mapping[str, bytes]) -> Converted:
    config = _object(data, "tekken.json", vocabulary).get("config")
    pattern = config.get("pattern") if isinstance(config, dict) else None
    if not isinstance(pattern, str):
        raise _refused(vocabulary, "tekken.json", "it has no pattern that splits text")
    plain = sorted((token for token in vocabulary.ids if token not in vocabulary.added), key=vocabulary.ids.__getitem__)
    # A whole word that is a token needs no merges.
    model = bpe(vocabulary.ids, _merges(plain), ignore_merges=True)
    roles = {role: token for role, token in _TEKKEN.items() if token in vocabulary.ids}
    parts = {
        "pre_tokenizer": split(pattern),
        "decoder": BYTE_LEVEL,
        "post_processor": _around(vocabulary, roles.get("bos", ""), ""),
    }
    return _converted(vocabulary, "tekken.json", model, parts, roles, {})


_TEKKEN = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
