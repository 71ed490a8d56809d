"""A tokenizer with the tokens of others: the base's tokenizer.json with more added tokens.

Every added token of every model is in it: special tokens, and others that are found before text is split (`<think>`). Ordinary
pieces that the base lacks are left out, so that plain text encodes as with the base. As added tokens (which is what mergekit
makes of them) they would be found in the middle of words, before any merge, and those with a marker for spaces (`Ġword`) could
never be found at all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from weightsmith.errors import Unsupported
from weightsmith.tokenizers.vocabulary import NO_MERGES, Added, Vocabulary, json_object, without_merges

_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
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
    found: dict[str, Added] = {}
    for other in others:
        if other.family != base.family or base.family not in CAN_UNITE:
            raise Unsupported(
                "tokenizers of different families cannot be united",
                where=where,
                details=[f"{one.label}: {one.family}" for one in (base, other)],
                fix=_WAYS,
            )
        for token, entry in sorted(other.added.items(), key=lambda item: item[1]["id"]):
            if token not in base.added and token not in found and (token not in base.ids or is_marker(token)):
                found[token] = entry
    return found


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
    own = list(tokenizer.get("added_tokens") or ())
    known = {entry["content"] for entry in own}
    # Tokens that only tokenizer_config.json lists have an id already, and must not lose it to a new one.
    more = [e for token, e in sorted(base.added.items(), key=lambda item: item[1]["id"]) if token not in known]
    more = [{"id": entry["id"], "content": entry["content"], **_FLAGS, **_flags(entry)} for entry in more]
    tokenizer |= {"truncation": None, "padding": None, "added_tokens": [*own, *more, *listed]}
    if wrong := _misread(tokenizer, {entry["content"] for entry in (*more, *listed)}):
        what = f"tokens cannot be added to this tokenizer: its ids have gaps, and {wrong[0]!r} would be read as id {wrong[1]:,}"
        raise Unsupported(what, where=base.label, fix=_WAYS)
    ids, added = dict(base.ids), dict(base.added)
    for entry in listed:
        ids[entry["content"]], added[entry["content"]] = entry["id"], entry
    # Without indentation: Python's JSON writer is then ten times as fast, and takes half the memory.
    written = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")).encode()
    written = written.replace(NO_MERGES, b'"merges":' + merges, 1)
    return United(Vocabulary(base.label, base.family, ids, added), tuple(new), written)


def _misread(tokenizer: Mapping[str, Any], tokens: Collection[str]) -> tuple[str, int] | None:
    """The first of these added tokens that a reader would give another id; and that id.

    The package `tokenizers` ignores the ids of added tokens that are not pieces of the model, and numbers them in their order.
    """
    vocab = tokenizer["model"]["vocab"]
    pieces = vocab if isinstance(vocab, dict) else {pair[0]: i for i, pair in enumerate(vocab)}
    given: dict[str, int] = {}
    highest = -1
    for entry in tokenizer["added_tokens"]:
        token = entry["content"]
        if token in given:
            continue
        given[token] = pieces[token] if token in pieces else max(len(pieces), highest + 1)
        highest = max(highest, given[token])
        if token in tokens and given[token] != entry["id"]:
            return token, given[token]
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
