"""The texts of a parquet file. `bounded_script.py` runs it for `rows.py`: the file as stdin, texts to stdout.

A few bytes of parquet may stand for any number of rows, pages and columns, of any size, and pyarrow has no bound for what it
decodes.

Output: for each part of a text, its length in bytes as int32 and the UTF-8; 0 after the last part of a text, -1 after the
last text.
"""

from __future__ import annotations

import runpy
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

DOING = "reading it"
BATCH_ROWS = 16
"""Rows that are decoded at once."""
PART_CHARACTERS = 1 << 20
MAX_COLUMNS = 100_000
"""The most columns, row groups and other list items in a footer, which takes a thousand times its size in memory."""


_text_of = runpy.run_path(str(Path(__file__).with_name("fields.py")))["text_of"]


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
            yield _text_of(row)


def _write(out: BinaryIO, text: str) -> None:
    for start in range(0, len(text), PART_CHARACTERS):
        part = text[start : start + PART_CHARACTERS].encode()
        out.write(struct.pack("<i", len(part)) + part)
    out.write(struct.pack("<i", 0))
