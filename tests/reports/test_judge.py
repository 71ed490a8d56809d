"""Perplexity, as transformers computes it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from weightsmith._reports.judge import ROW_TOKENS, Judge


@pytest.mark.parametrize("first", [(), (2,)], ids=["no BOS", "BOS"])
def test_rows_begin_as_the_tokenizer_begins_a_text(first: tuple[int, ...]) -> None:
    judge = Judge(_Model(), _Tokenizer(first))
    rows = judge.rows("x" * 1000)
    assert rows.shape == (2, ROW_TOKENS)
    text = ROW_TOKENS - len(first)
    assert [row.tolist() for row in rows] == [[*first, *range(10, 10 + text)], [*first, *range(10 + text, 10 + 2 * text)]]


def test_a_short_text_is_one_row() -> None:
    assert Judge(_Model(), _Tokenizer((2,))).rows("xyz").tolist() == [[2, 10, 11, 12]]


def test_a_text_of_one_token_has_no_perplexity() -> None:
    with pytest.raises(ValueError, match="fewer than two tokens"):
        Judge(_Model(), _Tokenizer((2,))).rows("x")


def test_losses_are_those_of_rows_and_perplexity_is_of_their_mean() -> None:
    judge = Judge(_Model(), _Tokenizer(()))
    text = "x" * (2 * ROW_TOKENS)
    assert judge.losses(text) == [10.0, 10.0 + ROW_TOKENS]
    assert judge.losses(text, 1) == [10.0]
    assert judge.perplexity(text, 1) == pytest.approx(math.exp(10))


class _Model:
    """Its loss is the first token of the row."""

    def eval(self) -> _Model:
        return self

    def __call__(self, input_ids: Any, labels: Any) -> Any:
        return SimpleNamespace(loss=labels[0, 0].double())


class _Tokenizer:
    """A token for each character, numbered from 10 by place."""

    bos_token_id = 2

    def __init__(self, first: tuple[int, ...]) -> None:
        self.first = first

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [*(self.first if add_special_tokens else ()), *range(10, 10 + len(text))]}
