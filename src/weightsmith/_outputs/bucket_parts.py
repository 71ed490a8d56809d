"""Parts of an output in a bucket that no driver leads (`run --part`): each keeps a record of what it has finished there.

    .out.weightsmith-staging/
      claim             shared by all parts; the first one creates it
      products/         values that several parts need
      parts/2-of-4      the record of a part: its process, and its finished tensors, files and products
      parts/last        that of the run that publishes

A record is a journal. Nobody can tell whether a process on another machine still runs, so whoever starts a part again takes its
record over. Each write names the version that it replaces: the process that had the record notices, and stops.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weightsmith._base.errors import NOTHING_WRITTEN, Busy, StoreError
from weightsmith._base.process import is_running
from weightsmith._outputs.bucket_store import Bucket, Taken
from weightsmith._outputs.journal import (
    MAX_JOURNAL_BYTES,
    Entries,
    encoded,
    layout_hash,
    plan_line,
    product_line,
    read_lines,
    tensor_line,
)
from weightsmith.abc.output import Built, OutputSpec, PartProgress

LAST = "last"
"""The label of the run that publishes."""
_OWNER, _DONE, _TOTAL, _PUT = "owner", "done", "total", "put "
NO_BUILT = Built({}, {}, {})
_MADE: set[str] = set()
"""The tokens that this process has made."""


def new_token(nbytes: int = 16) -> str:
    """A random token of this process: so many bytes, in hex."""
    token = secrets.token_hex(nbytes)
    _MADE.add(token)
    return token


def is_there(process: int, token: str) -> bool:
    """Whether the process that made a token is on this machine, by its number.

    A container that is started again has the name that it had, and often the same process numbers: 1, for instance.
    """
    return is_running(process) and (process != os.getpid() or token in _MADE)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that writes a record, since `began`: seconds since 1970.

    number  tells processes apart that have the same id on machines of the same name
    """

    number: str
    process: int
    host: str
    began: float

    @property
    def is_here(self) -> bool:
        """It is of this machine."""
        return self.host == socket.gethostname()

    @property
    def is_running(self) -> bool:
        """It is of this machine, and is there."""
        return self.is_here and is_there(self.process, self.number)


@dataclass(frozen=True, slots=True)
class Record:
    """A record, as it was read.

    label    of the part, or `LAST`
    token    of the run it is of; that of another run is no record of this one
    owner    None: nothing of it can be read
    done     the part is finished
    entries  plan and facts; tensors and products
    built    what the part has finished
    version  for a write that replaces it
    changed  when it was written: seconds since 1970
    """

    label: str
    token: str
    owner: Owner | None
    done: bool
    entries: Entries
    built: Built
    version: Mapping[str, Any]
    changed: float

    @property
    def progress(self) -> PartProgress:
        """For `status`."""
        owner, total = self.owner or Owner("", 0, "", 0.0), self.entries.notes.get(_TOTAL)
        running = owner.is_running if owner.is_here else None
        label = "" if self.label == LAST else self.label
        numbers = total if isinstance(total, int) else 0, self.entries.total
        tensors = self.built.tensors.keys()
        return PartProgress(label, owner.process, owner.host, running, self.done, tensors, *numbers, owner.began, self.changed)

    @property
    def may_run(self) -> bool:
        """Its process has not finished it, and is not known to have ended."""
        return not self.done and self.owner is not None and (not self.owner.is_here or self.owner.is_running)

    def __str__(self) -> str:
        what = "the last run" if self.label == LAST else f"part {self.label.replace('-', ' ')}"
        return what if self.owner is None else f"{what}, process {self.owner.process} on {self.owner.host}"


def read_record(store: Bucket, folder: str, label: str) -> Record | None:
    """The record of a part; None if there is none. folder: prefix of all records. Raises StoreError."""
    stored = store.read(f"{folder}/{label}", MAX_JOURNAL_BYTES)
    if stored is None:
        return None
    entries = read_lines(stored.data)
    owner = None
    match entries.notes.get(_OWNER):
        case [str(number), int(process), str(host), float(began)] if process > 0:
            owner = Owner(number, process, host, began)
    files = {key.removeprefix(_PUT): value for key, value in entries.notes.items() if key.startswith(_PUT)}
    built = Built(entries.tensors, entries.products, files)
    changed = stored.meta["last_modified"].timestamp()
    return Record(label, stored.mark, owner, entries.notes.get(_DONE) is True, entries, built, stored.version, changed)


def read_records(store: Bucket, folder: str) -> Iterator[Record]:
    """All records, of any run. Raises StoreError."""
    for label in store.names(folder):
        if (record := read_record(store, folder, label)) is not None:
            yield record


@dataclass(slots=True)
class OwnRecord:
    """The record that this process writes. Not thread-safe.

    folder  prefix of all records
    label   of the part, or `LAST`
    token   of the objects of the output, which marks the record too
    """

    store: Bucket
    folder: str
    label: str
    token: str
    spec: OutputSpec
    _owner: Owner = field(default_factory=lambda: Owner(new_token(8), os.getpid(), socket.gethostname(), time.time()))
    _version: Mapping[str, Any] | None = None

    def take(self) -> Built:
        """Write the record in place of an earlier process's: what that had finished.

        Raises Busy if a process of this machine works on it, or another one takes it at the same time.
        """
        earlier = read_record(self.store, self.folder, self.label)
        known = earlier if earlier is not None and earlier.token == self.token else None
        if known is not None and known.owner is not None and not known.done and known.owner.is_running:
            what, fix = f"another process is doing {known}", "wait until it has ended, or do another part"
            raise Busy(what, where=self._where, fix=fix, state=NOTHING_WRITTEN)
        self._version = None if earlier is None else earlier.version
        built = NO_BUILT
        if known is not None and known.entries.plan == self.spec.plan_hash:
            built = known.built
        try:
            self.write(built)
        except StoreError as error:
            error.state = NOTHING_WRITTEN
            raise
        return built

    def write(self, built: Built, *, done: bool = False) -> None:
        """Replace it. Raises Busy if another process has taken it over."""
        spec, owner = self.spec, self._owner
        places = spec.layout.places
        lines = [
            plan_line(spec.plan_hash, layout_hash(spec.layout), spec.facts, len(places)),
            encoded(["note", _OWNER, [owner.number, owner.process, owner.host, owner.began]]),
            encoded(["note", _TOTAL, len(places if spec.names is None else spec.names)]),
            encoded(["note", _DONE, done]),
            *(tensor_line(name, finished) for name, finished in built.tensors.items()),
            *(product_line(name, checksum) for name, checksum in built.products.items()),
            *(encoded(["note", f"{_PUT}{name}", value]) for name, value in built.files.items()),
        ]
        data = b"".join(lines)
        try:
            self._version = self.store.put_version(self._key, data, self._version, self.token)
        except Taken:
            stored = self.store.read(self._key, MAX_JOURNAL_BYTES)
            if stored is None or stored.data != data:  # else by ourselves: the answer to the first attempt was lost
                raise self._lost() from None
            self._version = stored.version

    def check(self) -> None:
        """Raise Busy if another process has taken it over."""
        current = read_record(self.store, self.folder, self.label)
        if current is None or current.owner != self._owner:
            raise self._lost()

    def remove(self) -> None:
        """Delete it, unless another process has taken it over."""
        with suppress(Busy):
            self.check()
            self.store.delete([self._key])

    def _lost(self) -> Busy:
        what = f"another process has taken over {'the last run' if self.label == LAST else f'part {self.label}'}"
        return Busy(what.replace("-", " "), where=self._where, fix="let that one finish: both were started for the same work")

    @property
    def _key(self) -> str:
        return f"{self.folder}/{self.label}"

    @property
    def _where(self) -> str:
        return self.store.shown(self._key)
