"""The texts of a parquet file. Run by `rows.py` in a process of its own: the file as stdin, texts to stdout.

A few bytes of parquet may stand for any number of rows, pages and columns, of any size, and pyarrow has no bound for what it
decodes. Here the system sets one: memory and processor time of this process. No module of weightsmith is imported.

Output: for each part of a text, its length in bytes as int32 and the UTF-8; 0 after the last part of a text, -1 after the
last text. An error is a line on stderr and status 1.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

BATCH_ROWS = 16
"""Rows that are decoded at once."""
PART_CHARACTERS = 1 << 20
MAX_COLUMNS = 100_000
"""The most columns, row groups and other list items in a footer, which takes a thousand times its size in memory."""


def main() -> None:
    """Arguments: bytes of memory, besides what the libraries take, and seconds of processor time."""
    from pyarrow import parquet

    _limit(int(sys.argv[1]), int(sys.argv[2]))
    try:
        for text in _texts(parquet.ParquetFile(sys.stdin.buffer, buffer_size=1 << 20, thrift_container_size_limit=MAX_COLUMNS)):
            _write(sys.stdout.buffer, text)
        sys.stdout.buffer.write(struct.pack("<i", -1))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except MemoryError:
        sys.exit(f"reading it takes more than {int(sys.argv[1]) >> 20:,} MiB of memory")
    except Exception as error:  # pyarrow raises anything for a damaged file
        sys.exit((str(error).strip().splitlines() or [type(error).__name__])[0][:500])


def _texts(file: Any) -> Iterator[str]:
    """The text of each row: the column `text`, or all columns that are text."""
    for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
        for number in range(batch.num_rows):
            [row] = batch.slice(number, 1).to_pylist()  # one by one: these take as much memory again
            own = row.get("text")
            yield own if isinstance(own, str) else " ".join(value for value in row.values() if isinstance(value, str))


def _write(out: BinaryIO, text: str) -> None:
    for start in range(0, len(text), PART_CHARACTERS):
        part = text[start : start + PART_CHARACTERS].encode()
        out.write(struct.pack("<i", len(part)) + part)
    out.write(struct.pack("<i", 0))


def _limit(nbytes: int, seconds: int) -> None:
    """Bound the memory of this process to `nbytes` more than it has, and its processor time. Not on Windows."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        with open("/proc/self/statm") as file:  # noqa: PTH123  fewer imports
            now = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (now + nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    main()
