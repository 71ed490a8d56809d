"""The texts of a parquet file. `bounded_script.py` runs it for `rows.py`: the file as stdin, texts to stdout.

A few bytes of parquet may stand for any number of rows, pages and columns, of any size, and pyarrow has no bound for what it
decodes. It runs in a process of its own, and imports no other module of weightsmith. `rows.py` uses `text_of` too.

Output: for each part of a text, its length in bytes as int32 and the UTF-8; 0 after the last part of a text, -1 after the
last text.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

DOING = "reading it"
BATCH_ROWS = 16
"""Rows that are decoded at once."""
PART_CHARACTERS = 1 << 20
MAX_COLUMNS = 100_000
"""The most columns, row groups and other list items in a footer, which takes a thousand times its size in memory."""


_CONVERSATIONS = {"messages": "content", "conversations": "value"}
"""Columns of turns, and what is said in a turn: of chat templates, and of ShareGPT."""


def text_of(row: Mapping[str, Any]) -> str:
    """The column `text`; or what is said in a conversation, a line for each turn; or all columns that are text.

    >>> text_of({"id": "a1", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]})
    'Hello\\nHi.'
    >>> text_of({"prompt": "1 + 1 =", "completion": "2", "label": 1})
    '1 + 1 = 2'
    """
    if isinstance(text := row.get("text"), str):
        return text
    for column, key in _CONVERSATIONS.items():
        if isinstance(turns := row.get(column), list):
            said = (turn.get(key, turn.get("content")) for turn in turns if isinstance(turn, dict))
            return "\n".join(part for part in said if isinstance(part, str))
    return " ".join(value for value in row.values() if isinstance(value, str))


def load() -> Any:
    """The reader of parquet files."""
    from pyarrow import parquet

    return parquet


def run(parquet: Any) -> None:
    """Write the texts of the file that stdin is."""
    for text in _texts(parquet.ParquetFile(sys.stdin.buffer, buffer_size=1 << 20, thrift_container_size_limit=MAX_COLUMNS)):
        _write(sys.stdout.buffer, text)
    sys.stdout.buffer.write(struct.pack("<i", -1))
    sys.stdout.buffer.flush()


def _texts(file: Any) -> Iterator[str]:
    """The text of each row: the column `text`, or what is said in a conversation, or all columns that are text."""
    for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
        for number in range(batch.num_rows):
            [row] = batch.slice(number, 1).to_pylist()  # one by one: these take as much memory again
            yield text_of(row)


def _write(out: BinaryIO, text: str) -> None:
    for start in range(0, len(text), PART_CHARACTERS):
        part = text[start : start + PART_CHARACTERS].encode()
        out.write(struct.pack("<i", len(part)) + part)
    out.write(struct.pack("<i", 0))
