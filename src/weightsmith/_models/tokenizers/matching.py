"""Which row of a model serves for each token of another tokenizer; and how the tokens for which none does are composed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Unsupported
from weightsmith._models.structure.configs import whole_numbers
from weightsmith._models.tokenizers.convert import FLAGS, tokenizer_bytes
from weightsmith._models.tokenizers.files import settings_of
from weightsmith._models.tokenizers.vocabulary import NO_MERGES, Added, Vocabulary, json_object, without_merges

WAYS = ("missing", "same token", "same role", "same byte", "prefix", "no token")
"""How a row was found. `no token`: the row is padding."""

ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
"""The roles of special tokens: `bos_token` in tokenizer_config.json, `bos_token_id` in config.json."""


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
    finder, padding = _TokenFinder(out, model, roles, byte, prefix), unused_row(model, size)
    for i in range(rows):
        token = out.tokens.get(i)
        if token is None:
            number, way = (i if i < size and i not in model.tokens else padding), "no token"
        else:
            number, way = finder.find(token)
        if 0 <= number < size:
            numbers[i], ways[i] = number, WAYS.index(way)
    return Match(numbers, ways)


class _TokenFinder:
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


# ---- A tokenizer with the tokens of others: the base's tokenizer.json with more added tokens


_FLAGS = {**FLAGS, "special": True}
_WAYS = "use 'tokenizer_source: base', or the model whose tokenizer you want: rows are then found by the bytes of their tokens"

CAN_UNITE = frozenset({"byte-level BPE", "SentencePiece BPE", "unigram", "WordPiece", "BPE"})


@dataclass(frozen=True, slots=True)
class United:
    """A vocabulary with more tokens.

    new        the tokens that were added, in the order of their ids
    tokenizer  the new tokenizer.json; b"" if no token was added
    """

    vocabulary: Vocabulary
    new: tuple[str, ...]
    tokenizer: bytes = b""


def missing_tokens(base: Vocabulary, others: Sequence[Vocabulary], where: str) -> dict[str, Added]:
    """The added tokens of others that the base lacks, in the order of the models and of their ids.

    A marker that is an ordinary piece of the base is among them, because the base may split it; other text that is one is not.

    Raises Unsupported for tokenizers of different families. where: the key of the recipe
    """
    missing: dict[str, Added] = {}
    for other in others:
        if other.family != base.family or base.family not in CAN_UNITE:
            raise Unsupported(
                "tokenizers of different families cannot be united",
                where=where,
                details=[f"{one.label}: {one.family}" for one in (base, other)],
                fix=_WAYS,
            )
        for token, entry in sorted(other.added.items(), key=lambda item: item[1]["id"]):
            if token not in base.added and token not in missing and (token not in base.ids or is_marker(token)):
                missing[token] = entry
    return missing


def is_marker(token: str) -> bool:
    """True for a token that looks like a marker, not like a piece of a text.

    >>> [is_marker(token) for token in ("<think>", "</dsml:", "\uff5cDSML\uff5c", "[x]", "\\n\\n", "word", " word", "<>")]
    [True, True, True, True, False, False, False, False]
    """
    first = token[:1]
    return len(token) > 2 and not (first.isalnum() or first.isspace()) and any(map(str.isalnum, token))


def extend(base: Vocabulary, new: Mapping[str, Added], data: bytes) -> United:
    """A vocabulary with new added tokens after all others. No id changes.

    data  the base's tokenizer.json

    Truncation and padding, which a training run may have left in tokenizer.json, are removed. A new token that is a piece of
    the base keeps its id.

    Raises Unsupported if its ids have a gap that the new ids would fall into.
    """
    rest, merges = without_merges(data)
    tokenizer = json_object(rest, base.label, "tokenizer.json")
    following = count(max(base.ids.values(), default=-1) + 1)
    listed: list[dict[str, Any]] = [
        {"id": base.ids[token] if token in base.ids else next(following), "content": token, **_FLAGS, **_flags(entry)}
        for token, entry in new.items()
    ]
    listed_before = list(tokenizer.get("added_tokens") or ())
    known = {entry["content"] for entry in listed_before}
    # Tokens that only tokenizer_config.json lists have an id already, and must not lose it to a new one.
    unlisted = [e for token, e in sorted(base.added.items(), key=lambda item: item[1]["id"]) if token not in known]
    unlisted = [{"id": entry["id"], "content": entry["content"], **_FLAGS, **_flags(entry)} for entry in unlisted]
    tokenizer |= {"truncation": None, "padding": None, "added_tokens": [*listed_before, *unlisted, *listed]}
    if wrong := _misread(tokenizer, {entry["content"] for entry in (*unlisted, *listed)}):
        what = f"tokens cannot be added to this tokenizer: its ids have gaps, and {wrong[0]!r} would be read as id {wrong[1]:,}"
        raise Unsupported(what, where=base.label, fix=_WAYS)
    ids, added = dict(base.ids), dict(base.added)
    for entry in listed:
        ids[entry["content"]], added[entry["content"]] = entry["id"], entry
    written = tokenizer_bytes(tokenizer).replace(NO_MERGES, b'"merges":' + merges, 1)
    return United(Vocabulary(base.label, base.family, ids, added), tuple(new), written)


def _misread(tokenizer: Mapping[str, Any], tokens: Collection[str]) -> tuple[str, int] | None:
    """The first of these added tokens that a reader would give another id; and that id.

    The package `tokenizers` ignores the ids of added tokens that are not pieces of the model, and numbers them in their order.
    """
    vocab = tokenizer["model"]["vocab"]
    pieces = vocab if isinstance(vocab, dict) else {pair[0]: i for i, pair in enumerate(vocab)}
    id_by_reader: dict[str, int] = {}
    highest = -1
    for entry in tokenizer["added_tokens"]:
        token = entry["content"]
        if token in id_by_reader:
            continue
        id_by_reader[token] = pieces[token] if token in pieces else max(len(pieces), highest + 1)
        highest = max(highest, id_by_reader[token])
        if token in tokens and id_by_reader[token] != entry["id"]:
            return token, id_by_reader[token]
    return None


def _flags(entry: Added) -> dict[str, bool]:
    return {name: bool(entry[name]) for name in _FLAGS if isinstance(entry.get(name), bool)}


def left_out(out: Vocabulary, others: Iterable[Vocabulary]) -> dict[str, int]:
    """For each other model, how many of its tokens the output does not have."""
    counts = {}
    for other in others:
        find = out.find(other)
        counts[other.label] = sum(find(token) is None for token in other.ids)
    return counts


# ---- Tables of rows: for each id of the output's tokenizer, the row of each model; and what replaces the rows that a model
# lacks.
#
# Where a model lacks a token, its row is that of the only model that has it; else the base's; else the mean of those that
# have it. A rule of the recipe replaces that choice for its token. A row that no model has is a copy of one that is hardly
# used: zeros would make it the most likely token of a model whose other logits are negative.

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowRule:
    """What the recipe says about a token of the output.

    number  its id
    model   index of the model whose row replaces missing ones; -1: zeros
    row     in that model
    force   all models take it, also those that have the token
    """

    number: int
    model: int
    row: int
    force: bool


@dataclass(frozen=True, slots=True)
class RowAlignment:
    """The rows of the output, by model.

    model_rows  int32 [rows] for each model: its row for each id; -1 where it has none
    defaults  the same: its row where models lack it, and it is the model, or one of those, whose rows replace theirs; else -1
    unused    for each model a row that is hardly used; -1 if there is none
    sources   number of tokens by what their rows are made from
    """

    model_rows: tuple[Rows, ...]
    defaults: tuple[Rows, ...]
    unused: tuple[int, ...]
    sources: Mapping[str, int]


def align(
    out: Vocabulary,
    rows: int,
    models: Sequence[Vocabulary],
    labels: Sequence[str],
    sizes: Sequence[int],
    base: int,
    rules: Sequence[RowRule] = (),
) -> RowAlignment:
    """The tables for an output with a tokenizer and a number of rows.

    labels names of the models, for `RowAlignment.sources`
    sizes  rows of each model's embedding: a token whose id is larger (a ghost) has no row
    base   index of the base

    An id of no token is a row of padding: it comes from the same row of a model, if that is padding there too.

    Cost: about 0.2 µs for each row and model.
    """
    tokens = out.tokens
    model_rows = [_rows_in(out, tokens, rows, model, size) for model, size in zip(models, sizes, strict=True)]
    has = np.array([numbers >= 0 for numbers in model_rows])
    count = has.sum(axis=0)
    one, several = count == 1, (count > 1) & (count < len(model_rows))
    from_base, mean = several & has[base], several & ~has[base]
    incomplete = count < len(model_rows)
    chosen = [one & incomplete & of | mean & of for of in has]
    chosen[base] = chosen[base] | from_base
    defaults = [np.where(of, numbers, -1).astype(np.int32) for of, numbers in zip(chosen, model_rows, strict=True)]
    unused = tuple(unused_row(model, size) for model, size in zip(models, sizes, strict=True))
    if unused[base] >= 0:
        defaults[base][count == 0] = unused[base]
    ruled = np.zeros(rows, bool)
    for rule in rules:
        i = rule.number
        for numbers in defaults:
            numbers[i] = -1
        if rule.force:
            for numbers in model_rows:
                numbers[i] = -1
        if rule.model >= 0:
            defaults[rule.model][i] = rule.row
        ruled[i] = True
    used = np.zeros(rows, bool)
    used[[number for number in tokens if number < rows]] = True
    counted = {"in all models": ~incomplete, **{f"only in {labels[k]}": one & incomplete & of for k, of in enumerate(has)}}
    counted |= {f"not in all: {labels[base]}": from_base, "not in all: mean": mean, "in no model": count == 0}
    sources = {name: int((which & used & ~ruled).sum()) for name, which in counted.items()}
    sources |= {"by 'tokens' of the recipe": int(ruled.sum()), "rows without a token": int((~used).sum())}
    return RowAlignment(tuple(model_rows), tuple(defaults), unused, {name: n for name, n in sources.items() if n})


def unused_row(model: Vocabulary, size: int) -> int:
    """The last row of padding, else that of the last piece, which is the rarest in most vocabularies; -1 if there is none."""
    padding = next((row for row in range(size - 1, -1, -1) if row not in model.tokens), -1)
    if padding >= 0:
        return padding
    return max((number for token, number in model.ids.items() if number < size and token not in model.added), default=-1)


def _rows_in(out: Vocabulary, tokens: Mapping[int, str], rows: int, model: Vocabulary, size: int) -> Rows:
    """The model's row for each id; -1 where it has none."""
    if model is out:
        numbers = np.arange(rows, dtype=np.int32)
    else:
        numbers, theirs = np.full(rows, -1, np.int32), model.tokens
        find = model.find(out)
        for i in range(rows):
            token = tokens.get(i)
            if token is not None:
                row = find(token)
                numbers[i] = -1 if row is None else row
            elif i not in theirs:
                numbers[i] = i
    numbers[numbers >= size] = -1
    return numbers
