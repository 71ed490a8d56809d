"""The text of a row of a data set. Imports no other module: `parquet_script.py` runs it in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CONVERSATIONS = {"messages": "content", "conversations": "value"}
"""Columns of turns, and what is said in a turn: of chat templates, and of ShareGPT."""


def text_of(row: Mapping[str, Any]) -> str:
    """The column `text`; or what is said in a conversation, a line for each turn; or all columns that are text.

    >>> text_of({"id": "a1", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]})
    'Hello\\nHi.'
    >>> text_of({"prompt": "1 + 1 =", "completion": "2", "label": 1})
    '1 + 1 = 2'
    """
    if isinstance(own := row.get("text"), str):
        return own
    for column, key in _CONVERSATIONS.items():
        if isinstance(turns := row.get(column), list):
            said = (turn.get(key, turn.get("content")) for turn in turns if isinstance(turn, dict))
            return "\n".join(each for each in said if isinstance(each, str))
    return " ".join(value for value in row.values() if isinstance(value, str))
