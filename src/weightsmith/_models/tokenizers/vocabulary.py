"""Reads the tokens of a model, and their ids, from whatever files its tokenizer has.

Tokens are compared as their vocabulary writes them, where two tokenizers are of one family. Between families they are compared
as bytes: `Ġthe` of byte-level BPE and `▁the` of SentencePiece are both b" the".
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from weightsmith._base.errors import FormatError
from weightsmith._base.files import read_bounded, show
from weightsmith._base.strict_json import parse_object

# ---- SentencePiece models: `tokenizer.model`, `spiece.model`. The protocol buffer's fields as values
#
# The numbers of fields and types are those of sentencepiece_model.proto (https://github.com/google/sentencepiece).


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of a message: an integer, or the bytes of a fixed or stated length.

    Raises ValueError for bytes that are no message.

    >>> for number, value in fields(memoryview(bytes([8, 172, 2, 18, 1, 97]))):
    ...     print(number, value if isinstance(value, int) else bytes(value))
    1 300
    2 b'a'
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        length, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if length < 0 or at + length > len(data):
            raise ValueError(f"a field of the type {kind} that does not fit")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at a byte, seven bits in each, and the place behind it."""
    value = 0
    for shift, byte in zip(range(0, 70, 7), data[at:], strict=False):
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("a number that does not end, or has more than 64 bits")


SPACE = "\u2581"
"""Stands for a space in pieces."""

_BPE = 2
_ROLES = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}  # field, default


class PieceKind(IntEnum):
    """Types of pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class VocabularyPiece:
    """A token. kind: its type, a `PieceKind`, or another number."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """A model.

    pieces         by id
    bpe            BPE, not unigram; True or False for these, None for words or characters
    byte_fallback  unknown characters become tokens for bytes
    roles          `unk`, `bos`, `eos`, `pad` → id; without those that the model does not have
    charsmap       the compiled table of normalisation; b"": none
    prefix         a space is put before each text
    squeeze        spaces are removed at both ends of a text, and runs of them become one
    escape         spaces are written as `SPACE`
    suffix         the mark of a space ends a word; it does not begin one
    """

    pieces: tuple[VocabularyPiece, ...]
    bpe: bool | None
    byte_fallback: bool
    roles: Mapping[str, int]
    charsmap: bytes
    prefix: bool
    squeeze: bool
    escape: bool
    suffix: bool

    @property
    def ids(self) -> dict[str, int]:
        """Id by text; the first of equal ones."""
        id_of_text: dict[str, int] = {}
        for number, piece in enumerate(self.pieces):
            id_of_text.setdefault(piece.text, number)
        return id_of_text


def read_sentencepiece(data: bytes) -> SentencePiece:
    """The model in the bytes of a file. Raises ValueError if there is none."""
    pieces: list[VocabularyPiece] = []
    trainer: dict[int, int | memoryview] = {}
    normalizer: dict[int, int | memoryview] = {}
    for key, value in fields(memoryview(data)):
        if not isinstance(value, memoryview):
            continue
        if key == 1:
            pieces.append(_piece(value))
        elif key == 2:
            trainer = dict(fields(value))
        elif key == 3:
            normalizer = dict(fields(value))
    if not pieces:
        raise ValueError("a model without pieces")
    charsmap = normalizer.get(2, memoryview(b""))
    if isinstance(charsmap, int):  # bytes() of it would be as many zeros
        raise ValueError("a table that is a number")
    roles = {role: _signed(trainer.get(key, default)) for role, (key, default) in _ROLES.items()}
    return SentencePiece(
        pieces=tuple(pieces),
        bpe={1: False, _BPE: True}.get(_signed(trainer.get(3, 1))),
        byte_fallback=trainer.get(35, 0) == 1,
        roles={role: number for role, number in roles.items() if 0 <= number < len(pieces)},
        charsmap=bytes(charsmap),
        prefix=normalizer.get(3, 1) == 1,
        squeeze=normalizer.get(4, 1) == 1,
        escape=normalizer.get(5, 1) == 1,
        suffix=trainer.get(24, 0) == 1,
    )


def _piece(data: memoryview) -> VocabularyPiece:
    inner = dict(fields(data))
    text, score, kind = inner.get(1, memoryview(b"")), inner.get(2, memoryview(bytes(4))), inner.get(3, PieceKind.NORMAL)
    if isinstance(text, int):
        raise ValueError("a piece whose text is a number")
    if isinstance(score, int) or len(score) != 4 or not isinstance(kind, int):
        raise ValueError("a piece whose score or type is of another type")
    (number,) = struct.unpack("<f", score)
    if not math.isfinite(number):
        raise ValueError("a piece whose score is not finite")
    return VocabularyPiece(bytes(text).decode(), number, kind)


def _signed(value: int | memoryview) -> int:
    """An int32 field. Negative numbers are written as 64 bits."""
    if not isinstance(value, int):
        raise ValueError("a number of another type")
    return value - (1 << 64) if value >> 63 else value


# ---- the tokens of a model


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


Family = Literal["byte-level BPE", "BPE", "SentencePiece BPE", "unigram", "WordPiece", "unknown"]

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tekken.json", "tokenizer.model", "spiece.model"),
)
"""The files that are read, if present. Besides them `tokenizer.model.v3` and the like, and `*.tiktoken`."""

_RANKS_OR_PIECES = re.compile(r"\.model|\.tiktoken$")
_OTHER_FILES = re.compile(r"tokenizer\.model\.v\d+\w*|[\w.-]+\.tiktoken", re.ASCII)

MAX_FILE_BYTES = 128 << 20
_MAX_JSON_MEMORY = 1 << 30  # estimated: 0.6 GB for Gemma 3's 33 MB, which take 0.25 GB
MAX_ID = 1 << 22
"""More than twice the ids of the largest published vocabulary, of a million tokens."""
MAX_SENTINELS = 100_000
"""A number in a small file: each sentinel takes a few hundred bytes of memory. T5 has 100."""
_SETTINGS, _ROLES_FILE = "tokenizer_config.json", "special_tokens_map.json"
_DECODER = "added_tokens_decoder"
_NAMES_TOKENS = re.compile(r"(?!add_)\w+_tokens?$|(added_tokens_decoder|extra_ids|tokenizer_class|auto_map)$")
"""Keys of tokenizer_config.json from which the tokens follow."""
_NAMED_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def _roles(**tokens: str) -> Mapping[str, str]:
    """Special tokens by role, as keys of tokenizer_config.json."""
    return {f"{role}_token": token for role, token in tokens.items()}


_ENDS = _roles(bos="<s>", eos="</s>", unk="<unk>")
_TEXT = "<|endoftext|>"
_BERT = _roles(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
_ROBERTA = {**_ENDS, **_roles(sep="</s>", pad="<pad>", cls="<s>", mask="<mask>")}
_COHERE_ENDS = _roles(bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>")
_IMPLIED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("", "PreTrainedTokenizer", "TokenizersBackend"), _roles()),
    "LlamaTokenizer": _ENDS,
    "GemmaTokenizer": _roles(bos="<bos>", eos="<eos>", unk="<unk>", pad="<pad>", mask="<mask>"),
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer"), _roles(bos=_TEXT, eos=_TEXT, unk=_TEXT)),
    "GPTNeoXTokenizer": _roles(bos=_TEXT, eos=_TEXT, unk=_TEXT, pad="<|padding|>"),
    **dict.fromkeys(("Qwen2Tokenizer", "Qwen3_5Tokenizer"), _roles(eos=_TEXT, unk=_TEXT, pad=_TEXT)),
    "CohereTokenizer": {**_COHERE_ENDS, **_roles(unk="<UNK>", sep="<SEP>", pad="<PAD>", cls="<CLS>", mask="<MASK_TOKEN>")},
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"), _BERT),
    **dict.fromkeys(("RobertaTokenizer", "XLMRobertaTokenizer"), _ROBERTA),
    "T5Tokenizer": _roles(eos="</s>", unk="<unk>", pad="<pad>"),
}
"""Class of transformers, without `Fast` → the special tokens that it adds for roles that no file names."""

_REPAIR = "Repair the tokenizer's files, or download them again."

Added = Mapping[str, Any]
"""An entry of `added_tokens`: content, id, special, lstrip, rstrip, normalized, single_word."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of one tokenizer.

    label      of its model
    family     how text becomes tokens
    ids        id by token, added tokens included
    added      the added tokens, by token: special ones, and others that are found before the text is split
    """

    label: str
    family: Family
    ids: Mapping[str, int]
    added: Mapping[str, Added]

    @cached_property
    def tokens(self) -> dict[int, str]:
        """Token by id. If two tokens have the same id, the added one."""
        plain = {number: token for token, number in self.ids.items() if token not in self.added}
        return plain | {number: token for token, number in self.ids.items() if token in self.added}

    @cached_property
    def as_bytes(self) -> dict[bytes, int]:
        """Id by the bytes that a token stands for, to compare it with tokenizers of other families.

        Added tokens win. A piece wins against SentencePiece's token for a byte (`A` against `<0x41>`): no text gives that.
        """
        spell = _SPELLINGS[self.family]
        id_of_bytes: dict[bytes, int] = {}
        for token, number in sorted(self.ids.items(), key=lambda item: self.is_byte(item[0])):
            if token not in self.added:
                id_of_bytes.setdefault(spell(token), number)
        return id_of_bytes | {self.key(token): self.ids[token] for token in self.added}

    def is_special(self, token: str) -> bool:
        """True for a special token: `<s>`."""
        return token in self.added and self.added[token].get("special") is True

    def is_byte(self, token: str) -> bool:
        """True for SentencePiece's token for a byte, `<0x41>`."""
        return byte_of(token) is not None if _SPELLINGS[self.family] is _spell_sentencepiece else False

    def key(self, token: str) -> bytes:
        """The bytes that one of its tokens stands for."""
        spell = _SPELLINGS[self.family]
        return token.encode() if token in self.added and spell is not _spell_sentencepiece else spell(token)

    def find(self, other: Vocabulary) -> Callable[[str], int | None]:
        """A function from a token of another tokenizer to its id in this one."""
        if self.family == other.family or "unknown" in (self.family, other.family):
            return self.ids.get
        return lambda token: self.as_bytes.get(other.key(token))


def digest_of(folder: Path, files: Sequence[str]) -> str:
    """Equal for equal files of a tokenizer; "" if there are none. Nothing is parsed."""
    data = contents_of(folder, files)
    return _digest(data) if data else ""


def token_digest_of(folder: Path, files: Sequence[str]) -> str:
    """Equal for files that give the same tokens and differ in chat templates and other settings; "" if there are none.

    Raises FormatError for a damaged tokenizer_config.json.
    """
    data = contents_of(folder, files)
    if _SETTINGS in data:
        settings = json_object(data[_SETTINGS], str(folder), _SETTINGS)
        naming = {key: value for key, value in settings.items() if _NAMES_TOKENS.match(key)}
        data[_SETTINGS] = json.dumps(naming, sort_keys=True).encode()
    return _digest(data) if data else ""


def contents_of(folder: Path, files: Sequence[str]) -> dict[str, bytes]:
    """The files of a tokenizer that are read, by name."""
    others = sorted(name for name in files if _OTHER_FILES.fullmatch(name))
    return {name: read_bounded(folder / name, MAX_FILE_BYTES) for name in (*FILES, *others) if name in files}


def main_file(data: Mapping[str, bytes]) -> str:
    """Which of the files has the tokens; "" if none has."""
    known = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json")
    return next((name for name in (*known, *data) if name in data and (name in known or _RANKS_OR_PIECES.search(name))), "")


def _digest(data: Mapping[str, bytes]) -> str:
    return hashlib.sha256(b"".join(name.encode() + hashlib.sha256(text).digest() for name, text in data.items())).hexdigest()


def read_vocabulary(
    label: str, folder: Path, files: Sequence[str], seen: dict[str, Vocabulary] | None = None
) -> Vocabulary | None:
    """The tokens of a model; None if it has no tokenizer that can be read.

    label  for messages
    files  names of the files in the folder
    seen   tokenizers that were read: files of equal tokens are parsed once, and equal tokenizers are one object

    Raises FormatError for a damaged file.
    """
    data = contents_of(folder, files)
    name = main_file(data)
    if not name:
        return None
    seen = {} if seen is None else seen
    digest = _digest({name: data[name]})
    if digest not in seen:
        seen[digest] = _parse(label, name, data[name])
    plain = seen[digest]
    added = _added_beside(plain, name, data, label)
    if not added:
        return plain
    digest += json.dumps(list(added.values()), sort_keys=True)
    if digest not in seen:
        ids = {**plain.ids, **{token: entry["id"] for token, entry in added.items()}}
        seen[digest] = Vocabulary(plain.label, plain.family, ids, {**plain.added, **added})
    return seen[digest]


def _parse(label: str, name: str, data: bytes) -> Vocabulary:
    """The tokens in the file that has most of them."""
    added: dict[str, Added] = {}
    if name == "tokenizer.json":
        tokenizer = json_object(without_merges(data)[0], label, name)
        model = tokenizer.get("model")
        if not isinstance(model, dict):
            raise _wrong(label, name, "has no model")
        ids, family = _pieces(model.get("vocab"), label), _family(tokenizer, model)
        added = _added(tokenizer.get("added_tokens"), label)
    elif name == "vocab.json":
        ids, family = _pieces(json_object(data, label, name), label), "byte-level BPE"
    elif name == "vocab.txt":
        lines = data.decode("utf-8", "replace").split("\n")
        ids, family = {token.rstrip("\r"): i for i, token in enumerate(lines) if token.strip()}, "WordPiece"
    elif name == "tekken.json":
        ids, family, added = _tekken(json_object(data, label, name), label)
    elif (ranks := read_ranks(data)) is not None:
        ids, family = ranks, "byte-level BPE"
    else:
        ids, family, added = _sentencepiece(data, label, name)
    return Vocabulary(label, family, ids | {token: entry["id"] for token, entry in added.items()}, added)


def _added_beside(plain: Vocabulary, name: str, data: Mapping[str, bytes], label: str) -> dict[str, Added]:
    """The added tokens that the other files list or name, besides those of the main one.

    plain, name  the tokens of the main file, and its name
    """
    settings = json_object(data[_SETTINGS], label, _SETTINGS) if _SETTINGS in data else {}
    numbered = _numbers_names(name, plain.family, settings)
    added: dict[str, Added] = {}

    def number(tokens: Iterable[str]) -> None:
        last = max([*plain.ids.values(), *(entry["id"] for entry in added.values())], default=-1)
        for i, token in enumerate(tokens, last + 1):
            added[token] = {"id": i, "content": token, "special": True}

    if numbered and name.endswith(".model") and _class_of(settings) == "T5Tokenizer":
        number([token for token in _sentinels(settings, label) if token not in plain.ids])
    for content, entry in _listed(settings, data, label).items():
        # As transformers does: a piece of tokenizer.json that these files list under its id is an added token.
        taken = name == "tokenizer.json" and plain.ids.get(content, entry["id"]) != entry["id"]
        if content not in plain.added and content not in added and not taken:
            added[content] = entry
    if numbered:
        number(dict.fromkeys(_unlisted(settings, data, label, plain.ids.keys() | added.keys())))
    return added


_STRING = rb'"(?:[^"\\]|\\.)*+"'
_PAIR = rb"\[\s*+" + _STRING + rb"\s*+,\s*+" + _STRING + rb"\s*+\]"
_MERGES = re.compile(rb'(?<!\\)"merges"\s*+:\s*+(\[(?:\s*+(?:' + _STRING + rb"|" + _PAIR + rb")\s*+,?+)*+\s*+\])")
NO_MERGES = b'"merges":[]'


def without_merges(data: bytes) -> tuple[bytes, bytes]:
    """A tokenizer.json with `NO_MERGES`, and its merges: they are three quarters of the values, and no row depends on them.

    The second is b"[]" where no list of merges is found.

    >>> without_merges(b'{"vocab": {"a": 0}, "merges": [["a", "b"], "c d"]}')
    (b'{"vocab": {"a": 0}, "merges":[]}', b'[["a", "b"], "c d"]')
    """
    match = _MERGES.search(data)
    if match is None:
        return data, b"[]"
    return data[: match.start()] + NO_MERGES + data[match.end() :], match[1]


def json_object(data: bytes, label: str, name: str) -> dict[str, Any]:
    """The object in a file of a tokenizer. Raises FormatError."""
    return parse_object(data, name, label, _REPAIR, unique=False, max_memory=_MAX_JSON_MEMORY)


def _wrong(label: str, name: str, what: str) -> FormatError:
    return FormatError(f"{name} {what}", where=label, fix=_REPAIR)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_ID


def _pieces(listed: object, label: str) -> dict[str, int]:
    """Id by token: of a mapping, or of unigram's list of [token, score]."""
    if isinstance(listed, dict) and all(map(_is_id, listed.values())):
        return dict(listed)
    if isinstance(listed, list) and all(isinstance(pair, list) and pair and isinstance(pair[0], str) for pair in listed):
        id_of_token: dict[str, int] = {}
        for i, pair in enumerate(listed):
            id_of_token.setdefault(pair[0], i)
        return id_of_token
    raise _wrong(label, "tokenizer.json", "has a vocabulary that is neither tokens with ids nor a list of tokens")


def _added(listed: object, label: str) -> dict[str, Added]:
    entries = [] if listed is None else listed
    if not isinstance(entries, list):
        raise _wrong(label, "tokenizer.json", "has added tokens that are not a list")
    if not all(isinstance(e, dict) and isinstance(e.get("content"), str) and _is_id(e.get("id")) for e in entries):
        raise _wrong(label, "tokenizer.json", "has an added token without content or id")
    return {entry["content"]: entry for entry in entries if entry["content"]}


def _listed(settings: Mapping[str, Any], data: Mapping[str, bytes], label: str) -> dict[str, Added]:
    """The added tokens that tokenizer_config.json (settings) lists; those of added_tokens.json if it lists none.

    transformers reads the older file only where tokenizer_config.json has no `added_tokens_decoder`.
    """
    added: dict[str, Added] = {}
    listed = settings.get(_DECODER)
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        if number.isascii() and number.isdigit() and len(number) < 9 and isinstance(entry, dict):
            if isinstance(entry.get("content"), str) and entry["content"] and _is_id(int(number)):
                added[entry["content"]] = {**entry, "id": int(number)}
    if "added_tokens.json" in data and _DECODER not in settings:
        for content, value in json_object(data["added_tokens.json"], label, "added_tokens.json").items():
            if content and _is_id(value):
                added.setdefault(content, {"id": value, "content": content, "special": False})
    return added


def _numbers_names(main: str, family: Family, settings: Mapping[str, Any]) -> bool:
    """Whether a loader numbers the special tokens that no file lists, as `_unlisted` does.

    Not where code of the model does, or another package, or a class of transformers that may add others before them.
    """
    pieces = main.endswith(".model") and family != "byte-level BPE"  # not the ranks of tiktoken
    known = pieces or main in ("tokenizer.json", "vocab.json", "vocab.txt")
    return known and "auto_map" not in settings and _class_of(settings) in _IMPLIED


def _class_of(settings: Mapping[str, Any]) -> str:
    """The tokenizer's class, without `Fast`; "" if none is named."""
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def _sentinels(settings: Mapping[str, Any], label: str) -> list[str]:
    """The tokens that T5's class puts after the pieces of a SentencePiece model, in the order of their ids.

    The first sentinel has the last id, in whatever order a file lists them. Raises FormatError if there are too many.

    >>> _sentinels({"extra_ids": 2}, "model")
    ['<extra_id_1>', '<extra_id_0>']
    """
    count = settings.get("extra_ids", 100)
    if not _is_id(count):
        return []
    if count > MAX_SENTINELS:
        raise _wrong(label, _SETTINGS, f"has extra_ids {count:,}, and at most {MAX_SENTINELS:,} are supported")
    return [f"<extra_id_{i}>" for i in reversed(range(count))]


def _unlisted(settings: Mapping[str, Any], data: Mapping[str, bytes], label: str, ids: Collection[str]) -> Iterator[str]:
    """The special tokens without an id that the files name by their role, in the order in which transformers numbers them.

    Tokens that the class implies for other roles are among them if they come before such a token: they take an id.
    special_tokens_map.json counts where tokenizer_config.json lists no added tokens.
    """
    stated = dict(settings)
    if _DECODER not in settings and _ROLES_FILE in data:
        stated |= json_object(data[_ROLES_FILE], label, _ROLES_FILE)
    of_files, pending = set(_named(stated)), list[str]()
    for token in _named({**_IMPLIED[_class_of(settings)], **stated}):
        if token in ids:
            continue
        pending.append(token)
        if token in of_files:
            yield from pending
            pending = []


def _named(roles: Mapping[str, Any]) -> Iterator[str]:
    """The special tokens of tokenizer_config.json or special_tokens_map.json, in the order of transformers."""
    extra = roles.get("extra_special_tokens") or roles.get("additional_special_tokens")
    plain = extra if isinstance(extra, list) else []
    by_name = extra if isinstance(extra, dict) else {}
    named = {**{role: token for role, token in roles.items() if role.endswith("_token") and isinstance(token, str)}, **by_name}
    known = [f"{role}_token" for role in _NAMED_ROLES]
    values = [*map(roles.get, known), *(token for role, token in named.items() if role not in known), *plain]
    for value in values:
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str) and content:
            yield content


# ---- families


def _family(tokenizer: Mapping[str, Any], model: Mapping[str, Any]) -> Family:
    kind = model.get("type")
    if kind == "Unigram" or (kind is None and isinstance(model.get("vocab"), list)):
        return "unigram"
    if kind in ("WordPiece", "WordLevel") or (kind is None and "max_input_chars_per_word" in model):
        return "WordPiece"
    if kind not in ("BPE", None):
        return "unknown"
    steps = [_types(tokenizer.get(part)) for part in ("normalizer", "pre_tokenizer", "decoder")]
    if any("ByteLevel" in types for types in steps):
        return "byte-level BPE"
    vocab = model.get("vocab")
    marked = isinstance(vocab, dict) and (SPACE in vocab or any(token.startswith(SPACE) for token in vocab))
    return "SentencePiece BPE" if model.get("byte_fallback") is True or marked else "BPE"


def _types(part: object) -> set[str]:
    """The types in a normaliser, pre-tokenizer or decoder, which may be a sequence."""
    types: set[str] = set()
    todo = [part]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if isinstance(kind := value.get("type"), str):
                types.add(kind)
            todo += [inner for inner in value.values() if isinstance(inner, list | dict)]
        elif isinstance(value, list):
            todo += value
    return types


def _spell_byte_level(token: str) -> bytes:
    """
    >>> _spell_byte_level("Ġthe")
    b' the'
    """
    values = [BYTES.get(character, -1) for character in token]
    return token.encode() if -1 in values else bytes(values)


def _spell_sentencepiece(token: str) -> bytes:
    """
    >>> _spell_sentencepiece("▁the"), _spell_sentencepiece("<0x0A>")
    (b' the', b'\\n')
    """
    byte = byte_of(token)
    return token.replace(SPACE, " ").encode() if byte is None else byte


def _spell_wordpiece(token: str) -> bytes:
    """
    >>> _spell_wordpiece("the"), _spell_wordpiece("##ing")
    (b' the', b'ing')
    """
    return token[2:].encode() if token.startswith("##") and len(token) > 2 else f" {token}".encode()


_SPELLINGS: Mapping[Family, Callable[[str], bytes]] = {
    "byte-level BPE": _spell_byte_level,
    "SentencePiece BPE": _spell_sentencepiece,
    "unigram": _spell_sentencepiece,
    "WordPiece": _spell_wordpiece,
    "BPE": str.encode,
    "unknown": str.encode,
}


# ---- other files


def _sentencepiece(data: bytes, label: str, name: str) -> tuple[dict[str, int], Family, dict[str, Added]]:
    """The pieces of a SentencePiece model."""
    try:
        model = read_sentencepiece(data)
    except ValueError as error:
        raise _wrong(label, name, "is not a SentencePiece model") from error
    added: dict[str, Added] = {
        piece.text: {"id": number, "content": piece.text, "special": piece.kind == PieceKind.CONTROL}
        for number, piece in enumerate(model.pieces)
        if piece.kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED) and piece.text
    }
    return model.ids, "SentencePiece BPE" if model.bpe else "unigram", added


def read_ranks(data: bytes) -> dict[str, int] | None:
    """The ranks of a tiktoken file: a token in base64 and its rank on each line. None for another file."""
    rank_of_token: dict[str, int] = {}
    try:
        for line in data.splitlines():
            piece, rank = line.split()
            rank_of_token.setdefault(byte_level(base64.b64decode(piece, validate=True)), int(rank[:9]))
    except ValueError:
        return None
    return rank_of_token or None


_TEKKEN_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] "
    "<pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
"""Those that mistral_common takes for files that list none."""


def _tekken(tekken: Mapping[str, Any], label: str) -> tuple[dict[str, int], Family, dict[str, Added]]:
    """Mistral's tekken.json: special tokens first, then the ranks; tokens beyond the vocabulary's size are not used."""
    config, ranks = tekken.get("config"), tekken.get("vocab")
    config = config if isinstance(config, dict) else {}
    size, n_special = config.get("default_vocab_size"), config.get("default_num_special_tokens")
    if not isinstance(ranks, list) or not _is_id(size) or not _is_id(n_special):
        raise _wrong(label, "tekken.json", "has no vocabulary, or does not say how much of it is used")
    assert isinstance(size, int)
    assert isinstance(n_special, int)
    listed = tekken.get("special_tokens")
    if listed is None:  # files until version 7
        listed = [{"rank": i, "token_str": token} for i, token in enumerate(_TEKKEN_SPECIAL[:n_special])]
    added: dict[str, Added] = {
        f"<SPECIAL_{i}>": {"id": i, "content": f"<SPECIAL_{i}>", "special": True} for i in range(n_special)
    }
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("token_str"), str) and _is_id(entry.get("rank")):
            added.pop(f"<SPECIAL_{entry['rank']}>", None)
            added[entry["token_str"]] = {"id": entry["rank"], "content": entry["token_str"], "special": True}
    ids: dict[str, int] = {}
    for i, entry in enumerate(ranks[: max(0, size - n_special)]):
        text = entry.get("token_bytes") if isinstance(entry, dict) else None
        try:
            piece = base64.b64decode(text, validate=True) if isinstance(text, str) else None
        except ValueError:
            piece = None
        if piece is None:
            raise _wrong(label, "tekken.json", f"has a token that is not base64: {show(text)}")
        ids.setdefault(byte_level(piece), n_special + i)
    return ids, "byte-level BPE", added
