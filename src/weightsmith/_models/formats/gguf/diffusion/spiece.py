"""UMT5's tokenizer in GGUF files for ComfyUI: the keys of a SentencePiece model, and such a model of the keys.

ComfyUI's files of UMT5 have the model's bytes as the tensor `spiece_model`. In GGUF files, llama.cpp's keys have the same
pieces, from which ComfyUI-GGUF makes such a tensor again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show
from weightsmith._models.formats.gguf.layout import Value
from weightsmith._models.tokenizers.vocabulary import PieceKind, read_sentencepiece

SPIECE = "spiece_model"
"""The tensor of ComfyUI's files with the model's bytes."""
SPIECE_FILES = ("spiece.model", "tokenizer.model")
"""What the model is called beside the weights."""
UMT5_TOKENS = 256_384
"""Rows of UMT5's embedding. Other T5 models have ComfyUI's own tokenizer."""

_UNUSED_SCORE = -10_000.0
_IDS = {"eos": "eos", "pad": "padding", "unk": "unknown", "bos": "bos"}
"""Role of a piece → llama.cpp's name of its key."""
_NEEDED = ("eos", "pad")
_KINDS = frozenset(map(int, PieceKind))
_TRAINED = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
"""Role of a piece → the field of the model's TrainerSpec."""
_UNIGRAM, _MODEL_TYPE, _BYTE_FALLBACK = 1, 3, 35
_CHARSMAP, _PREFIX, _SQUEEZE = 2, 3, 4
_NO_PIECE = (1 << 64) - 1
"""-1, as protocol buffers store it."""


def spiece_keys(data: bytes, rows: int, where: str) -> dict[str, Value]:
    """The keys of a SentencePiece model with unigrams, as llama.cpp's converter writes them.

    data  the model
    rows  of the embedding: those without a piece are called `[PAD17]`

    Raises FormatError for damaged bytes, Unsupported for another model.
    """
    try:
        model = read_sentencepiece(data)
    except ValueError as error:
        raise FormatError(
            f"its SentencePiece model cannot be read: {error}", where=where, fix="download the model again"
        ) from error
    lacking = [role for role in _NEEDED if role not in model.roles]
    if model.bpe is not False or len(model.pieces) > rows or lacking:
        what = f"its SentencePiece model has {len(model.pieces):,} pieces for {rows:,} rows"
        what = f"its SentencePiece model has no piece for {lacking[0]}" if lacking else what
        what = "its SentencePiece model has no unigrams" if model.bpe is not False else what
        raise Unsupported(f"{what}, so it is not UMT5's", where=where, fix="use the tokenizer of the model's release")
    missing = rows - len(model.pieces)
    pads = [f"[PAD{number}]" for number in range(len(model.pieces), rows)]
    values = {
        "model": Value("str", "t5"),
        "pre": Value("str", "default"),
        "tokens": Value("str", [piece.text for piece in model.pieces] + pads),
        "scores": Value("f32", [piece.score for piece in model.pieces] + [_UNUSED_SCORE] * missing),
        "token_type": Value("i32", [piece.kind for piece in model.pieces] + [int(PieceKind.UNUSED)] * missing),
        "add_space_prefix": Value("bool", model.prefix),
        "remove_extra_whitespaces": Value("bool", model.squeeze),
        **({"precompiled_charsmap": Value("u8", list(model.charsmap))} if model.charsmap else {}),
        **{f"{name}_token_id": Value("u32", model.roles[role]) for role, name in _IDS.items() if role in model.roles},
        "add_bos_token": Value("bool", False),
        "add_eos_token": Value("bool", True),
    }
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def spiece_of_keys(keys: Mapping[str, Any], where: str) -> bytes | None:
    """A SentencePiece model with the pieces of a GGUF file; None if the file has no tokenizer. Raises FormatError."""
    tokens, scores, kinds = (_listed(keys, name) for name in ("tokens", "scores", "token_type"))
    if keys.get("tokenizer.ggml.model") != "t5" or not tokens:
        return None
    numbers = all(isinstance(score, float | int) and math.isfinite(score) and abs(score) < 3e38 for score in scores)
    known = _KINDS.issuperset(kinds)
    if len(tokens) != len(scores) or len(tokens) != len(kinds) or not numbers or not known:
        what = f"{len(tokens):,} tokens, {len(scores):,} scores and {len(kinds):,} types are not a tokenizer"
        raise FormatError(what, where=where, fix=DAMAGED)
    used = max((i + 1 for i, kind in enumerate(kinds) if kind != PieceKind.UNUSED), default=len(tokens))
    pieces = (
        _field(1, _field(1, str(token).encode()) + b"\x15" + struct.pack("<f", score) + _field(3, kind))
        for token, score, kind in zip(tokens[:used], scores, kinds, strict=False)
    )
    ids = {role: keys.get(f"tokenizer.ggml.{name}_token_id") for role, name in _IDS.items()}
    if wrong := [
        role for role, number in ids.items() if number is not None and not (type(number) is int and 0 <= number < used)
    ]:
        what = f"the number of the {wrong[0]} token is {show(ids[wrong[0]])}, and there are {used:,} tokens"
        raise FormatError(what, where=where, fix=DAMAGED)
    roles = {_TRAINED[role]: _NO_PIECE if number is None else number for role, number in ids.items()}
    trained = {_MODEL_TYPE: _UNIGRAM, _BYTE_FALLBACK: int(PieceKind.BYTE in kinds), **dict(sorted(roles.items()))}
    charsmap = keys.get("tokenizer.ggml.precompiled_charsmap")
    normalised = _field(_CHARSMAP, charsmap.astype(np.uint8).tobytes()) if isinstance(charsmap, np.ndarray) else b""
    for number, name in ((_PREFIX, "add_space_prefix"), (_SQUEEZE, "remove_extra_whitespaces")):
        normalised += _field(number, int(keys.get(f"tokenizer.ggml.{name}", True) is True))
    trainer = b"".join(_field(number, value) for number, value in trained.items())
    return b"".join(pieces) + _field(2, trainer) + _field(3, normalised)


def _listed(keys: Mapping[str, Any], name: str) -> Sequence[Any]:
    values = keys.get(f"tokenizer.ggml.{name}")
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    return listed if isinstance(listed, list) else []


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer: an integer, or bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """An integer, seven bits in each byte."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
