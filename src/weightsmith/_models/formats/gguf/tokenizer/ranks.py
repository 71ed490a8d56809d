"""Kimi's tokenizer, whose file has the ranks of tiktoken. Code beside it says how text is split, and names special tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from weightsmith._base.errors import FormatError
from weightsmith._base.files import DAMAGED, show
from weightsmith._models.formats.gguf.tokenizer.parts import list_of, object_of
from weightsmith._models.tokenizers.convert import bpe, split
from weightsmith._models.tokenizers.vocabulary import read_ranks

RANKS = "tiktoken.model"
_CODE = "tokenization_kimi."
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
KIMI_SPLIT = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How it splits text: Chinese characters are apart from other letters."""
_MOST_WORK = 10**8
"""The largest sum of the squares of the tokens' lengths. Kimi's is a tenth of it."""


def ranked_tokenizer(files: Mapping[str, bytes], rows: int) -> dict[str, Any] | None:
    """What tokenizer.json would say of Kimi's tokenizer; None for another one, or without its file.

    rows  of the embedding: those that no token is known of are reserved

    Raises FormatError for tokens of which the merges would take long to find, and for added ones without a text of their own.
    """
    settings = object_of(files, "tokenizer_config.json")
    code = settings.get("auto_map")
    code = code.get("AutoTokenizer") if isinstance(code, dict) else None
    named = [name for name in list_of(code) if isinstance(name, str)] or [code if isinstance(code, str) else ""]
    ranks = read_ranks(files[RANKS]) if RANKS in files and named[0].rpartition("--")[2].startswith(_CODE) else None
    if ranks is None:
        return None
    if sum(len(token) ** 2 for token in ranks) > _MOST_WORK:
        raise FormatError("its tokens are longer than those of any tokenizer", where=RANKS, fix=DAMAGED)
    added = {number: f"<|reserved_token_{number}|>" for number in range(len(ranks), rows)}
    listed = settings.get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        if number.isascii() and number.isdigit() and int(number[:9]) in added:
            content = entry.get("content") if isinstance(entry, dict) else None
            if not isinstance(content, str):
                what = f"token {number} of added_tokens_decoder has no content"
                raise FormatError(what, where="tokenizer_config.json", fix="repair it")
            added[int(number[:9])] = content
    for text, times in Counter([*ranks, *added.values()]).items():
        if times > 1:
            what = f"{times} tokens are {show(text)}"
            raise FormatError(what, where="tokenizer_config.json", fix="give each row of the embedding another one")
    return {
        "added_tokens": [{"id": number, "content": text, "special": True} for number, text in added.items()],
        "pre_tokenizer": split(KIMI_SPLIT),
        "model": bpe(ranks, merges_of(ranks)),
    }


def merges_of(ranks: Mapping[str, int]) -> list[list[str]]:
    """The merges with which BPE joins what tiktoken joins by rank. Cost: 3 s for 160,000 tokens.

    ranks  of tokens in the characters of byte-level BPE

    >>> merges_of({"a": 0, "b": 1, "ab": 2, "abab": 3})
    [['a', 'b'], ['ab', 'ab']]
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        parts = list(token)
        while len(parts) > 2:
            joined = [ranks.get(left + right, math.inf) for left, right in pairwise(parts)]
            best = min(joined)
            if best >= rank:
                break
            place = joined.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            merges.append(parts)
    return merges
