"""Rows of tables that hold whole numbers for each token, such as the experts that DeepSeek V4 routes it to.

No approximation makes such numbers. A missing token takes the row of the first of the model's tokens that spell it, else a row
that is hardly used.
"""

from __future__ import annotations

from weightsmith._models.tokenizers import Vocabulary
from weightsmith._models.tokenizers.matching import Match, pieces_of, unused_row


def rows_of(token_match: Match, out: Vocabulary, model: Vocabulary, size: int) -> list[int]:
    """The model's row for each id of the output.

    token_match  rows of the tokens that both have
    size   rows of the model
    """
    rows: list[int] = token_match.rows.tolist()
    missing = [number for number, row in enumerate(rows) if row < 0]
    texts = [out.key(out.tokens[number]) if number in out.tokens else b"" for number in missing]
    unused = unused_row(model, size)
    for number, pieces in zip(missing, pieces_of(texts, model, size), strict=True):
        rows[number] = pieces[0] if pieces else unused
    return rows
