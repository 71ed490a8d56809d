"""The record of finished tensors, from which interrupted work goes on.

A text file of lines `<xxh3_64 of the rest, 16 hex digits> <JSON array>`. The first line names the plan; then one line
for each finished tensor. Each line is one append, and stands on its own: a line torn by a crash does not match its
hash and is ignored.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

VERSION = 1


@dataclass(frozen=True, slots=True)
class Entries:
    """What a journal says.

    plan, layout  hashes of the plan and of all weight files' headers; "" when the first line is unreadable
    tensors       name -> checksum of each finished tensor
    published     (device, inode) of the folder that was about to be renamed to its final name, or None
    lines         number of readable lines
    """

    plan: str = ""
    layout: str = ""
    tensors: dict[str, str] = field(default_factory=dict)
    published: tuple[int, int] | None = None
    lines: int = 0


def read_journal(path: Path) -> Entries:
    """The readable lines of a journal; a missing file is an empty journal."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Entries()
    plan = layout = ""
    tensors: dict[str, str] = {}
    published: tuple[int, int] | None = None
    count = 0
    for line in data.split(b"\n"):
        entry = _decode(line)
        if entry is None:
            continue
        count += 1
        match entry:
            case ["plan", int(version), str(plan_hash), str(layout_hash)] if version == VERSION:
                plan, layout = plan_hash, layout_hash
            case ["tensor", str(name), str(checksum)]:
                tensors[name] = checksum
            case ["publish", int(device), int(inode)]:
                published = (device, inode)
    return Entries(plan, layout, tensors, published, count)


def _decode(line: bytes) -> Any:
    digest, _, body = line.partition(b" ")
    if not body or digest != xxhash.xxh3_64_hexdigest(body).encode():
        return None
    return json.loads(body)


class Journal:
    """Appends lines. Thread-safe. Lines reach the operating system at once, the disk when it likes.

    That is enough: after a power loss, what the journal says is checked against the bytes on disk before it is
    believed.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o666)
        self._lock = threading.Lock()
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def start(self, plan: str, layout: str) -> None:
        """The first line."""
        self._append(["plan", VERSION, plan, layout])

    def tensor(self, name: str, checksum: str) -> None:
        """One finished tensor."""
        self._append(["tensor", name, checksum])

    def publish(self, device: int, inode: int) -> None:
        """The folder that is about to be renamed to its final name."""
        self._append(["publish", device, inode])
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _append(self, entry: list[str | int]) -> None:
        body = json.dumps(entry, separators=(",", ":")).encode()
        line = xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n"
        with self._lock:
            if self._torn:
                line = b"\n" + line
            self._torn = True  # until the whole line is out; a short write must not swallow the next line
            if os.write(self._fd, line) == len(line):
                self._torn = False
                return
        raise OSError(28, os.strerror(28))  # ENOSPC: Linux writes a part of the line when only that fits
