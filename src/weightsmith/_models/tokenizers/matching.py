"""Which row of a model serves for each token of another tokenizer; and how the tokens for which none does are composed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._models.structure.configs import whole_numbers
from weightsmith._models.tokenizers.files import settings_of
from weightsmith._models.tokenizers.union import Rows, unused_row
from weightsmith._models.tokenizers.vocabulary import Vocabulary

WAYS = ("missing", "same token", "same role", "same byte", "prefix", "no token")
"""How a row was found. `no token`: the row is padding."""

ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
"""Of special tokens: `bos_token` in tokenizer_config.json, `bos_token_id` in config.json."""


@dataclass(frozen=True, slots=True)
class Match:
    """The rows of a model for the ids of another tokenizer.

    rows  int32 [ids]: a row of the model; -1: none serves, and the token is missing
    ways  int8 [ids]: how it was found, an index into `WAYS`
    """

    rows: Rows
    ways: npt.NDArray[np.int8]

    @property
    def missing(self) -> npt.NDArray[np.int64]:
        """The ids of missing tokens, ascending."""
        return np.flatnonzero(self.rows < 0)


def match(
    out: Vocabulary,
    model: Vocabulary,
    rows: int,
    size: int,
    roles: Mapping[str, str],
    *,
    byte: bool = True,
    prefix: bool = False,
) -> Match:
    """The row of the model for each id of `out`.

    rows    of the output, from id 0 on
    size    rows of the model: a token with a larger id (a ghost) has none
    roles   special token of `out` → the model's special token of the same role
    byte    a token for one byte serves for the character, and the other way round
    prefix  the longest token that the text of a token begins with serves for it

    Tokens are compared as text, between families as bytes. A special token is never an ordinary one: it takes the special token
    of the same name, else that of the same role. An id without a token takes the same row if that is padding too, else a row
    that is hardly used.

    Cost: about 1 µs for each id.
    """
    numbers, ways = np.full(rows, -1, np.int32), np.zeros(rows, np.int8)
    if out is model:
        numbers[:size] = np.arange(min(rows, size))
        ways[:size] = [1 if i in out.tokens else 5 for i in range(min(rows, size))]
        return Match(numbers, ways)
    finder, padding = _Finder(out, model, roles, byte, prefix), unused_row(model, size)
    for i in range(rows):
        token = out.tokens.get(i)
        if token is None:
            number, way = (i if i < size and i not in model.tokens else padding), "no token"
        else:
            number, way = finder.find(token)
        if 0 <= number < size:
            numbers[i], ways[i] = number, WAYS.index(way)
    return Match(numbers, ways)


class _Finder:
    """Finds the row of one token after another."""

    def __init__(self, out: Vocabulary, model: Vocabulary, roles: Mapping[str, str], byte: bool, prefix: bool) -> None:
        self._out, self._model, self._roles, self._byte, self._prefix = out, model, roles, byte, prefix
        self._same = model.find(out)

    def find(self, token: str) -> tuple[int, str]:
        """The model's id, and how it was found; -1 if it was not."""
        model = self._model
        if self._out.is_special(token):
            if model.is_special(token):
                return model.ids[token], "same token"
            return model.ids.get(self._roles.get(token, ""), -1), "same role"
        number = self._same(token)
        if number is not None and model.is_byte(model.tokens[number]) == self._out.is_byte(token):
            return number, "same token"
        key = self._out.key(token)
        if self._byte and (number is not None or len(key) == 1):
            number = model.as_bytes.get(key)
            return -1 if number is None else number, "same byte"
        if self._prefix and token not in self._out.added:
            starts = (key[:n] for n in range(len(key) - 1, 0, -1))
            return next((model.as_bytes[s] for s in starts if s.strip() and s in model.as_bytes), -1), "prefix"
        return -1, "missing"


def roles_of(vocabulary: Vocabulary, folder: Path, files: Sequence[str], config: Mapping[str, Any] | None) -> dict[str, str]:
    """Role → special token, from the files of a tokenizer, else the ids in config.json."""
    token_of_role: dict[str, str] = {}
    settings = [settings_of(folder, files, name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
    for role in ROLES:
        for value in (entries.get(f"{role}_token") for entries in settings):
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str) and token in vocabulary.ids:
                token_of_role[role] = token
        for number in whole_numbers((config or {}).get(f"{role}_token_id"))[:1]:
            if role not in token_of_role and number in vocabulary.tokens:
                token_of_role[role] = vocabulary.tokens[number]
    return token_of_role


def same_roles(out: Mapping[str, str], model: Mapping[str, str]) -> dict[str, str]:
    """Token → the model's token of the same role; the first role counts for a token that has several.

    >>> same_roles({"bos": "<s>", "eos": "</s>", "pad": "</s>"}, {"bos": "<|begin|>", "eos": "<|end|>", "pad": "<|pad|>"})
    {'<s>': '<|begin|>', '</s>': '<|end|>'}
    """
    model_token: dict[str, str] = {}
    for role, token in out.items():
        if role in model:
            model_token.setdefault(token, model[role])
    return model_token


def pieces_of(keys: Iterable[bytes], model: Vocabulary, size: int) -> list[tuple[int, ...]]:
    """For each text the ids of tokens of the model that it is composed of: the fewest, of equally few the longest first.

    keys  the bytes that missing tokens stand for
    size  rows of the model

    Special tokens are no pieces, and no piece is the whole text. () if there are bytes for which the model has no token.
    """
    known = {
        key: number for key, number in model.as_bytes.items() if number < size and not model.is_special(model.tokens[number])
    }
    longest = max(map(len, known), default=0)
    return [_fewest(key, known, longest) for key in keys]


def _fewest(key: bytes, known: Mapping[bytes, int], longest: int) -> tuple[int, ...]:
    end = len(key)
    fewest = [0] * (end + 1)  # pieces from here to the end; end + 1: impossible
    first = [0] * (end + 1)  # length of the first of them
    for start in range(end - 1, -1, -1):
        fewest[start] = end + 1
        for length in range(min(longest, end - start), 0, -1):
            count = 1 + fewest[start + length]
            if count < fewest[start] and length < end and key[start : start + length] in known:
                fewest[start], first[start] = count, length
    if not end or fewest[0] > end:
        return ()
    pieces, start = [], 0
    while start < end:
        pieces.append(known[key[start : start + first[start]]])
        start += first[start]
    return tuple(pieces)
