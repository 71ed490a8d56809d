"""SentencePiece models: `tokenizer.model`, `spiece.model`. The protocol buffer's fields as values.

The numbers of fields and types are those of sentencepiece_model.proto (https://github.com/google/sentencepiece).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

# ---- Protocol buffers: the fields of a message, which is as much of the format as a SentencePiece model needs


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
