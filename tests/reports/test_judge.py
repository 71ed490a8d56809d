"""Perplexity, as transformers computes it."""

from __future__ import annotations

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


class _Model:
    def eval(self) -> _Model:
        return self


class _Tokenizer:
    """A token for each character, numbered from 10 by place."""

    bos_token_id = 2

    def __init__(self, first: tuple[int, ...]) -> None:
        self.first = first

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [*(self.first if add_special_tokens else ()), *range(10, 10 + len(text))]}
