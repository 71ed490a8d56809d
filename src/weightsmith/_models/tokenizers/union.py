"""A tokenizer with the tokens of others: the base's tokenizer.json with more added tokens.

Every added token of every model is in it: special tokens, and others that are found before text is split (`<think>`). Ordinary
pieces that the base lacks are left out, so that plain text encodes as with the base. As added tokens (which is what mergekit
makes of them) they would be found in the middle of words, before any merge, and those with a marker for spaces (`Ġword`) could
never be found at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsmith._base.errors import Unsupported
from weightsmith._models.tokenizers.parts import FLAGS, tokenizer_bytes
from weightsmith._models.tokenizers.vocabulary import NO_MERGES, Added, Vocabulary, json_object, without_merges

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
class Alignment:
    """The rows of the output, by model.

    rows      how many
    model_rows  int32 [rows] for each model: its row for each id; -1 where it has none
    defaults  the same: its row where models lack it, and it is the model, or one of those, whose rows replace theirs; else -1
    unused    for each model a row that is hardly used; -1 if there is none
    sources   number of tokens by what their rows are made from
    """

    rows: int
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
) -> Alignment:
    """The tables for an output with a tokenizer and a number of rows.

    labels names of the models, for `Alignment.sources`
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
    return Alignment(rows, tuple(model_rows), tuple(defaults), unused, {name: n for name, n in sources.items() if n})


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
