"""The record of finished tensors and products, from which interrupted work is resumed.

A text file of lines `<xxh3_64 of the rest, 16 hex digits> <JSON array>`. The first line names the plan, and what it was made
from; then one line
for each finished tensor or product. Each line is one append, and stands on its own: a line torn by a crash does not match its
hash and is ignored.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import xxhash

from weightsmith.formats.strict_json import JsonError, parse
from weightsmith.store import disk

VERSION = 4
MAX_JOURNAL_BYTES = 128 << 20  # 100,000 tensors take 15 MB


Distance = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Entries:
    """What a journal says.

    plan, layout  hashes of the plan and of all weight files' headers; "" when the first line is unreadable
    facts         what the plan was made from, for messages
    tensors       name -> checksum of each finished tensor
    distances     name -> squared norms of the tensor - its base, and of the base, where it has one
    made_from     name -> digest of the products that the tensor was made from, where there are some
    products      name -> checksum of each finished product
    published     (device, inode) of the folder that was about to be renamed to its final name, or None
    lines         number of readable lines
    """

    plan: str = ""
    layout: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    distances: dict[str, Distance] = field(default_factory=dict)
    made_from: dict[str, str] = field(default_factory=dict)
    products: dict[str, str] = field(default_factory=dict)
    published: tuple[int, int] | None = None
    lines: int = 0

    def add(self, other: Entries) -> None:
        """Take in what the journal of a part says of tensors and products."""
        self.tensors.update(other.tensors)
        self.distances.update(other.distances)
        self.made_from.update(other.made_from)
        self.products.update(other.products)


def read_journal(path: Path) -> Entries:
    """The readable lines of a journal; a missing file is an empty journal. Raises StoreError for what is no file."""
    data = disk.read_own(path, MAX_JOURNAL_BYTES) or b""
    plan = layout = ""
    facts: dict[str, str] = {}
    tensors: dict[str, str] = {}
    distances: dict[str, Distance] = {}
    made_from: dict[str, str] = {}
    products: dict[str, str] = {}
    published: tuple[int, int] | None = None
    count = 0
    for line in BytesIO(data):
        entry = _decode(line)
        if entry is None:
            continue
        count += 1
        match entry:
            case ["plan", int(version), str(plan_hash), str(layout_hash), dict(described)] if version == VERSION:
                plan, layout = plan_hash, layout_hash
                facts = {term: value for term, value in described.items() if isinstance(value, str)}
            case ["tensor", str(name), str(checksum), str(source)]:
                tensors[name], made_from[name] = checksum, source
                distances.pop(name, None)
            case ["tensor", str(name), str(checksum), str(source), float(moved), float(base)]:
                tensors[name], made_from[name] = checksum, source
                distances[name] = moved, base
            case ["product", str(name), str(checksum)]:
                products[name] = checksum
            case ["publish", int(device), int(inode)]:
                published = (device, inode)
    return Entries(plan, layout, facts, tensors, distances, made_from, products, published, count)


def _decode(line: bytes) -> Any:
    digest, _, body = line.rstrip(b"\n").partition(b" ")
    if not body or digest != xxhash.xxh3_64_hexdigest(body).encode():
        return None
    try:
        return parse(body)
    except JsonError:  # not a line of ours, though its hash is right
        return None


class Journal:
    """Appends lines. Thread-safe. Lines reach the operating system at once, the disk when it likes.

    That is enough: after a power loss, what the journal says is checked against the bytes on disk before it is
    believed. Only the first line is synced: it marks the folder as ours.
    """

    def __init__(self, path: Path) -> None:
        self._fd = disk.open_own(path, os.O_RDWR | os.O_APPEND, keep=True)
        self._lock = threading.Lock()
        size = os.fstat(self._fd).st_size
        last = bytearray(1)
        disk.read_into(self._fd, memoryview(last), max(0, size - 1))
        self._torn = size > 0 and last != b"\n"

    def start(self, plan: str, layout: str, facts: Mapping[str, str]) -> None:
        """The first line."""
        self._append(["plan", VERSION, plan, layout, dict(facts)])
        os.fsync(self._fd)

    def tensor(self, name: str, checksum: str, distance: Distance | None, made_from: str = "") -> None:
        """One finished tensor."""
        self._append(["tensor", name, checksum, made_from, *(distance or ())])

    def product(self, name: str, checksum: str) -> None:
        """One finished product."""
        self._append(["product", name, checksum])

    def publish(self, device: int, inode: int) -> None:
        """The folder that is about to be renamed to its final name."""
        self._append(["publish", device, inode])
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            fd, self._fd = self._fd, -1  # first, so that Ctrl-C while it is closed leads to no second close
            if fd >= 0:
                os.close(fd)

    def _append(self, entry: list[str | int | float | dict[str, str]]) -> None:
        body = json.dumps(entry, separators=(",", ":")).encode()
        line = xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n"
        with self._lock:
            if self._torn:
                line = b"\n" + line
            self._torn = True  # until the whole line is out; a short write must not swallow the next line
            if os.write(self._fd, line) == len(line):
                self._torn = False
                return
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # ENOSPC: Linux writes a part of the line when only that fits
