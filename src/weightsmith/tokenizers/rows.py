"""Tables of rows: for each id of the output's tokenizer, the row of each model; and what replaces the rows that a model lacks.

Where a model lacks a token, its row is that of the only model that has it; else the base's; else the mean of those that have
it. A rule of the recipe replaces that choice for its token. A row that no model has is a copy of one that is hardly used: zeros
would make it the most likely token of a model whose other logits are negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsmith.tokenizers.vocabulary import Vocabulary

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
    own       int32 [rows] for each model: its row for each id; -1 where it has none
    defaults  the same: its row where models lack it, and it is the model, or one of those, whose rows replace theirs; else -1
    sources   number of tokens by what their rows are made from
    """

    rows: int
    own: tuple[Rows, ...]
    defaults: tuple[Rows, ...]
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
    own = [_own(out, tokens, rows, model, size) for model, size in zip(models, sizes, strict=True)]
    has = np.array([numbers >= 0 for numbers in own])
    count = has.sum(axis=0)
    one, several = count == 1, (count > 1) & (count < len(own))
    from_base, mean = several & has[base], several & ~has[base]
    lacking = count < len(own)
    chosen = [one & lacking & of | mean & of for of in has]
    chosen[base] = chosen[base] | from_base
    defaults = [np.where(of, numbers, -1).astype(np.int32) for of, numbers in zip(chosen, own, strict=True)]
    if (unused := unused_row(models[base], sizes[base])) >= 0:
        defaults[base][count == 0] = unused
    ruled = np.zeros(rows, bool)
    for rule in rules:
        i = rule.number
        for numbers in defaults:
            numbers[i] = -1
        if rule.force:
            for numbers in own:
                numbers[i] = -1
        if rule.model >= 0:
            defaults[rule.model][i] = rule.row
        ruled[i] = True
    used = np.zeros(rows, bool)
    used[[number for number in tokens if number < rows]] = True
    counted = {"in all models": ~lacking, **{f"only in {labels[k]}": one & lacking & of for k, of in enumerate(has)}}
    counted |= {f"not in all: {labels[base]}": from_base, "not in all: mean": mean, "in no model": count == 0}
    sources = {name: int((which & used & ~ruled).sum()) for name, which in counted.items()}
    sources |= {"by 'tokens' of the recipe": int(ruled.sum()), "rows without a token": int((~used).sum())}
    return Alignment(rows, tuple(own), tuple(defaults), {name: n for name, n in sources.items() if n})


def unused_row(model: Vocabulary, size: int) -> int:
    """The last row of padding, else that of the last piece, which is the rarest in most vocabularies; -1 if there is none."""
    padding = next((row for row in range(size - 1, -1, -1) if row not in model.tokens), -1)
    if padding >= 0:
        return padding
    return max((number for token, number in model.ids.items() if number < size and token not in model.added), default=-1)


def _own(out: Vocabulary, tokens: Mapping[int, str], rows: int, model: Vocabulary, size: int) -> Rows:
    """The model's row for each id; -1 where it has none."""
    if model is out:
        numbers = np.arange(rows, dtype=np.int32)
    else:
        numbers, theirs = np.full(rows, -1, np.int32), model.tokens
        find = model.find(out)
        for i in range(rows):
            token = tokens.get(i)
            if token is not None:
                found = find(token)
                numbers[i] = -1 if found is None else found
            elif i not in theirs:
                numbers[i] = i
    numbers[numbers >= size] = -1
    return numbers
