"""Integer codes in words of 32 bits, along the rows of a matrix: the first code is in the lowest bits of the first word.

A code of 3, 5, 6 or 7 bits may begin in one word and end in the next: 32 codes fill as many words as a code has bits. Releases
of compressed-tensors before 0.18 left the rest of a word empty instead (`loose`). For other widths both are the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORD_BITS = 32


def words_of(codes: int, bits: int, *, loose: bool = False) -> int:
    """The words of a row of codes.

    >>> words_of(64, 3), words_of(64, 3, loose=True), words_of(9, 4)
    (6, 7, 2)
    """
    return -(-codes // (WORD_BITS // bits)) if loose else -(-codes * bits // WORD_BITS)


def is_loose(codes: int, bits: int, words: int) -> bool | None:
    """Whether a row of codes is stored loosely in so many words; None if it is stored neither way, or if nothing tells.

    >>> is_loose(64, 3, 6), is_loose(64, 3, 7), is_loose(64, 3, 8), is_loose(15, 3, 2)
    (False, True, None, None)
    """
    dense = words_of(codes, bits) == words
    same = WORD_BITS % bits == 0 or codes <= WORD_BITS // bits
    if same or words_of(codes, bits, loose=True) != words:
        return False if dense else None
    return None if dense else True


def rows_of_a_word(bits: int, *, loose: bool = False) -> int:
    """After so many codes, the next one begins a word."""
    return WORD_BITS // bits if loose or WORD_BITS % bits == 0 else WORD_BITS


def unpack_rows(words: npt.NDArray[np.uint32], bits: int, codes: int, *, loose: bool = False) -> npt.NDArray[np.uint8]:
    """The codes of rows.

    words  uint32 [rows, words]
    codes  of a row

    Returns uint8 [rows, codes].

    >>> unpack_rows(np.array([[0o76543210]], np.uint32), 3, 8)
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    from weightsmith._kernels.codes import unpack_down

    if loose:
        of_words = np.empty((WORD_BITS // bits, words.size), np.uint8)
        unpack_down(words.reshape(-1), words.size, bits, of_words.reshape(-1))
        return of_words.T.reshape(len(words), -1)[:, :codes]
    columns = np.empty((codes, len(words)), np.uint8)
    unpack_down(np.ascontiguousarray(words.T).reshape(-1), len(words), bits, columns.reshape(-1))
    return columns.T
