"""The record of finished tensors and products, from which interrupted work is resumed.

A text file of lines `<xxh3_64 of the rest, 16 hex digits> <JSON array>`. The first line identifies the plan and lists what it
was built from; one line for each finished tensor or product follows. Each line is one append. A line torn by a crash does not
match its hash and is ignored.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import xxhash

from weightsmith._base.errors import CannotResume
from weightsmith._base.files import read_all
from weightsmith._base.strict_json import JsonError, parse
from weightsmith._base.text import some_lines
from weightsmith._files.containers import Layout
from weightsmith._outputs import disk
from weightsmith._outputs.checksum import hash_bytes
from weightsmith.abc.output import Finished

VERSION = 6
MAX_JOURNAL_BYTES = 128 << 20  # 100,000 tensors take 15 MB


_quoted = json.encoder.encode_basestring_ascii
_BODY, _TENSOR = 17, b'["tensor","'
"""Where the JSON of a line begins, and that of a tensor's."""


FileState = tuple[int, int, int, int]
"""A file's size, the times of its last modification and of its last change in nanoseconds, and its inode. Whoever writes to the
file later changes the times; the second one can be set by no program."""


@dataclass(slots=True)
class Entries:
    """The contents of a journal.

    plan, layout  hashes of the plan and of all weight files' headers; "" when the first line is unreadable
    facts         what the plan was built from, for messages
    total         number of tensors of the plan, or of the part that this journal is of; 0: not known
    tensors       finished tensors by name
    products      checksums of finished products by name
    published     (device, inode) of the folder that was about to be renamed to its final name, or None
    notes         what a target needs to resume, by key: see `Notes`
    files         complete weight files, as they were when their bytes were on disk: see `FileState`
    lines         number of readable lines
    """

    plan: str = ""
    layout: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    total: int = 0
    tensors: dict[str, Finished] = field(default_factory=dict)
    products: dict[str, str] = field(default_factory=dict)
    published: tuple[int, int] | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileState] = field(default_factory=dict)
    lines: int = 0


def read_journal(path: Path, names: Collection[str] | None = None) -> Entries:
    """The readable lines of a journal; a missing file is an empty journal. Raises StoreError if it is not a file.

    names  of the tensors whose lines are read; None: all. Others cost a hundredth
    """
    return read_lines(disk.read_own(path, MAX_JOURNAL_BYTES) or b"", names)


def read_further(path: Path, start: int) -> tuple[Entries, int]:
    """The lines of a growing journal from byte `start` on, and the byte where the next ones will begin."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(MAX_JOURNAL_BYTES)
    data = data[: data.rfind(b"\n") + 1]
    return read_lines(data), start + len(data)


def read_lines(data: bytes, names: Collection[str] | None = None) -> Entries:
    """The readable lines in the bytes of a journal. names: of the tensors whose lines are read; None: all."""
    entries = Entries()
    for line in BytesIO(data):
        if names is not None and (name := _tensor_of(line)) is not None and name not in names:
            entries.lines += 1
            continue
        entry = _decode(line)
        if entry is None:
            continue
        entries.lines += 1
        match entry:
            case ["plan", int(version), str(plan_hash), str(layout_hash), dict(facts), int(total)] if version == VERSION:
                entries.plan, entries.layout, entries.total = plan_hash, layout_hash, total
                entries.facts = {term: value for term, value in facts.items() if isinstance(value, str)}
            case ["tensor", str(name), str(checksum), str(made_from), distance, bool(differing), bool(nonfinite)]:
                match distance:
                    case None:
                        entries.tensors[name] = Finished(checksum, made_from, None, differing, nonfinite)
                    case [float(moved), float(base)]:
                        entries.tensors[name] = Finished(checksum, made_from, (moved, base), differing, nonfinite)
            case ["part", int(total)]:
                entries.total = entries.total or total  # lines of parts are moved into the journal of the whole
            case ["file", str(name), int(nbytes), int(modified), int(changed), int(inode)]:
                entries.files[name] = nbytes, modified, changed, inode
            case ["product", str(name), str(checksum)]:
                entries.products[name] = checksum
            case ["publish", int(device), int(inode)]:
                entries.published = (device, inode)
            case ["note", str(key), value]:
                entries.notes[key] = value
    return entries


def encoded(entry: Sequence[object]) -> bytes:
    """One line."""
    return _line(json.dumps(entry, separators=(",", ":")))


def _line(text: str) -> bytes:
    body = text.encode()
    return xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n"


def plan_line(plan: str, layout: str, facts: Mapping[str, str], total: int) -> bytes:
    """The first line. total: number of tensors of the plan."""
    return encoded(["plan", VERSION, plan, layout, dict(facts), total])


def tensor_line(name: str, done: Finished) -> bytes:
    """The line of one finished tensor."""
    flags = (done.distance, done.differing, done.nonfinite)
    rest = "null,false,false" if flags == (None, False, False) else json.dumps(flags, separators=(",", ":"))[1:-1]
    # What json.dumps makes of it, in a tenth of the time: there may be a hundred thousand lines.
    return _line(f'["tensor",{_quoted(name)},{_quoted(done.checksum)},{_quoted(done.made_from)},{rest}]')


def product_line(name: str, checksum: str) -> bytes:
    """The line of one finished product."""
    return encoded(["product", name, checksum])


def _tensor_of(line: bytes) -> str | None:
    """The tensor of a line; None if the line must be parsed to know."""
    if not line.startswith(_TENSOR, _BODY):
        return None
    start = _BODY + len(_TENSOR)
    name = line[start : line.find(b'"', start)]
    try:
        return None if b"\\" in name else name.decode()
    except UnicodeDecodeError:  # a damaged line
        return None


def _decode(line: bytes) -> Any:
    digest, _, body = line.rstrip(b"\n").partition(b" ")
    if not body or digest != xxhash.xxh3_64_hexdigest(body).encode():
        return None
    try:
        return parse(body)
    except JsonError:  # not a line of ours, though its hash is right
        return None


class Journal:
    """Appends lines. Thread-safe. Lines are not synced, except the first one, which marks the folder as ours.

    That is enough: after a power loss, the journal is checked against the bytes on disk before it is trusted.
    """

    def __init__(self, path: Path) -> None:
        self._fd = disk.open_own(path, os.O_RDWR | os.O_APPEND, keep=True)
        self._lock = threading.Lock()
        size = os.fstat(self._fd).st_size
        last = bytearray(1)
        read_all(self._fd, memoryview(last), max(0, size - 1))
        self._torn = size > 0 and last != b"\n"

    def start(self, plan: str, layout: str, facts: Mapping[str, str], total: int) -> None:
        """The first line. total: number of tensors of the plan."""
        self._write(plan_line(plan, layout, facts, total))
        os.fsync(self._fd)

    def part(self, total: int) -> None:
        """The number of tensors of the part that this journal is of."""
        self._write(encoded(["part", total]))

    def tensor(self, name: str, done: Finished) -> None:
        """One finished tensor."""
        self._write(tensor_line(name, done))

    def file(self, name: str, state: FileState) -> None:
        """A weight file whose tensors are all finished, and on disk."""
        self._write(encoded(["file", name, *state]))

    def product(self, name: str, checksum: str) -> None:
        """One finished product."""
        self._write(product_line(name, checksum))

    def note(self, key: str, value: object) -> None:
        """A JSON value, in place of an earlier one of this key. On the disk when this returns."""
        self._write(encoded(["note", key, value]))
        os.fsync(self._fd)

    def publish(self, device: int, inode: int) -> None:
        """The folder that is about to be renamed to its final name."""
        self._write(encoded(["publish", device, inode]))
        os.fsync(self._fd)

    def absorb(self, path: Path) -> None:
        """Move the lines of another journal to the end of this one."""
        self._write((disk.read_own(path, MAX_JOURNAL_BYTES) or b"") + b"\n")
        path.unlink()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            fd, self._fd = self._fd, -1  # first, so that an interrupted close is not repeated
            if fd >= 0:
                os.close(fd)

    def _write(self, line: bytes) -> None:
        with self._lock:
            if self._torn:
                line = b"\n" + line
            self._torn = True  # until the whole line is written; a short write must not corrupt the next line
            if os.write(self._fd, line) == len(line):
                self._torn = False
                return
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # Linux writes part of the line if only that fits


class Notes(MutableMapping[str, Any]):
    """JSON values that the next run gets if this one is interrupted. What is entered is in the journal at once. Thread-safe."""

    def __init__(self, values: Mapping[str, Any], journal: Journal) -> None:
        self._values, self._journal = dict(values), journal

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._journal.note(key, value)
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        self[key] = None

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)


# may this run resume the work?


def layout_hash(layout: Layout) -> str:
    """Hash of all headers and the index."""
    return hash_bytes(b"".join(shard.header for shard in layout.shards) + b"".join(layout.indexes.values()))


def is_resumable(entries: Entries, plan_hash: str, layout: Layout, facts: Mapping[str, str], folder: Path | str) -> bool:
    """True if the work is of this very plan, False if nothing in it is finished.

    facts   of this run: what the plan was made from
    folder  where the work is, for messages

    Raises CannotResume if the work is of another plan and something in it is finished.
    """
    if (entries.plan, entries.layout) == (plan_hash, layout_hash(layout)):
        return True
    if not (entries.tensors or entries.products):
        return False
    details: list[str] = []
    if not entries.plan:
        what = "unfinished work is here, but the first line of its journal is unreadable"
    elif entries.plan == plan_hash:
        what = "unfinished work of this plan is here, but its files are laid out otherwise (another version?)"
    else:
        what = "the unfinished work here does not match this run"
        details = changes(entries.facts, facts) if entries.facts else []
    lost = f"{len(entries.tensors):,} of {len(layout.places):,} tensors" if entries.tensors else "a computed product"
    raise CannotResume(
        what,
        where=str(folder),
        details=(*details, f"discarding it would lose: {lost}"),
        fix="undo the change and run again to resume, discard the work with --no-resume (resume=False), "
        "or choose another output folder",
        state=f"Nothing was written. The unfinished work stays in {folder}",
    )


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two sets of facts, the first 20 of them.

    >>> changes({"parameters.t": "0.3", "files of ./b": "#51f0"}, {"parameters.t": "0.4", "files of ./b": "#77aa", "seed": "1"})
    ['parameters.t: 0.3 -> 0.4', 'files of ./b: changed', 'seed: not set -> 1']
    """
    lines = []
    for term in dict.fromkeys([*before, *now]):
        old, new = before.get(term, "not set"), now.get(term, "not set")
        if old != new:
            opaque = old.startswith("#") and new.startswith("#")
            lines.append(f"{term}: changed" if opaque else f"{term}: {_short(old)} -> {_short(new)}")
    lines = lines or ["other details of the plan: comments in the recipe, or an option"]
    return some_lines(lines, 20)


def _short(value: str) -> str:
    if value.startswith("#"):
        return "other"
    return value if len(value) <= 60 else f"{value[:57]}..."
