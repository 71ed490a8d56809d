"""What a plan may ask of a model: a statistic of a text that runs through it (`weightsmith._activations`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextSource:
    """A text, cut into rows of tokens.

    source     the absolute path of a file: .txt, .jsonl or .parquet; `built-in`
    sha256     of the text
    rows       number of rows
    tokens     tokens per row
    seed       for choosing rows
    tokenizer  sha256 of the tokenizer.json that cuts it
    """

    source: str
    sha256: str
    rows: int
    tokens: int
    seed: int
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class StatisticRequest:
    """A statistic of one model on one text.

    kind   a name of `weightsmith._activations.statistics.STATISTICS`
    model  its index in the plan
    text   with as many rows as it has; `weightsmith._activations.text_for` makes it
    merged  what enters a layer comes out of the merged layers below
    """

    kind: str
    model: int
    text: TextSource
    merged: bool = False
