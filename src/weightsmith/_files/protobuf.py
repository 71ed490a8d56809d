"""Protocol buffers: the fields of a message, which is as much of the format as a SentencePiece model needs."""

from __future__ import annotations

from collections.abc import Iterator


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
