"""What is uploaded, in one small object that is rewritten each time. Another run resumes from it, on any machine.

A process that builds a part for another one has a journal of its own, with the same lines.

The lines are those of a local journal (`outputs.journal`), and further ones:

    ["upload", file, id]                 of the upload of a weight file
    ["group", *key, etags]               all parts of this group are uploaded; its tensors have lines of their own
    ["publishing", names, replaced]      files of the output are being written: these, in place of those
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from weightsmith._base.errors import StoreError
from weightsmith._outputs.bucket.client import Bucket, not_ours
from weightsmith._outputs.bucket.parts import GroupKey
from weightsmith._outputs.journal import (
    MAX_JOURNAL_BYTES,
    Entries,
    encoded,
    plan_line,
    product_line,
    read_lines,
    tensor_line,
)
from weightsmith._outputs.manifest import fits_name

CHECKSUM = re.compile("[0-9a-f]{32}")


@dataclass(slots=True)
class State(Entries):
    """The contents of a journal. `tensors` are those of finished groups, `products` those that are uploaded.

    token       of this work, in the metadata of the weight files: which objects it has completed
    uploads     weight file → id of its upload
    groups      group → ETags of the parts
    publishing  files of the output, and files that they replace, from when the first of them is written; None before that
    """

    token: str = ""
    uploads: dict[str, str] = field(default_factory=dict)
    groups: dict[GroupKey, tuple[str, ...]] = field(default_factory=dict)
    publishing: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def encode(self) -> bytes:
        """The bytes of the journal."""
        lines = [plan_line(self.plan, self.layout, self.facts), encoded(["token", self.token])]
        lines += [encoded(["upload", *each]) for each in self.uploads.items()]
        lines += [encoded(["group", *which, list(etags)]) for which, etags in self.groups.items()]
        lines += [tensor_line(*each) for each in self.tensors.items()]
        lines += [product_line(*each) for each in self.products.items()]
        lines += [] if self.publishing is None else [encoded(["publishing", *map(list, self.publishing)])]
        return b"".join(lines)

    def is_same_work(self, other: State) -> bool:
        """Whether what is in the other journal is part of this work."""
        return (self.plan, self.layout, self.token) == (other.plan, other.layout, other.token)

    def absorb(self, other: State) -> None:
        """Enter what a process that builds a part has finished."""
        self.groups |= other.groups
        self.tensors |= other.tensors
        self.products |= other.products


class Written(NamedTuple):
    """A journal. age_seconds: since it was written."""

    state: State
    age_seconds: float


def read_state(bucket: Bucket, key: str) -> Written | None:
    """The journal of unfinished work; None if there is none. Raises StoreError for an object of another program.

    A journal begins with the line of its plan, and has a token.
    """
    found = bucket.read(key, MAX_JOURNAL_BYTES)
    if found is None:
        return None
    entries = read_lines(found.data)
    tensors = {name: done for name, done in entries.tensors.items() if CHECKSUM.fullmatch(done.checksum)}
    state = State(entries.plan, entries.layout, entries.facts, tensors, entries.products, lines=entries.lines)
    for entry in entries.others:
        match entry:
            case ["token", str(token)]:
                state.token = token
            case ["upload", str(file), str(upload)] if fits_name(file):
                state.uploads[file] = upload
            case ["group", str(file), int(part), int(start), int(nbytes), list(etags)] if all(
                isinstance(etag, str) for etag in etags
            ):
                state.groups[GroupKey(file, part, start, nbytes)] = tuple(etags)
            case ["publishing", list(names), list(replaced)] if all(map(_is_name, [*names, *replaced])):
                state.publishing = tuple(names), tuple(replaced)
    if not (state.plan and state.token):
        raise not_ours(key)
    return Written(state, found.age_seconds)


class FollowedParts:
    """Which tensors other processes finish, while they do: see `abc.output.Followed`. Their journals are read in turn."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        """prefix: of the journals' keys, without the label of the part."""
        self._bucket, self._prefix = bucket, prefix
        self._turn = 0

    def look(self, parts: Iterable[str]) -> set[str]:
        """The tensors that one of these parts (labels) has finished."""
        labels = sorted(parts)
        if not labels:
            return set()
        self._turn += 1
        with suppress(StoreError):
            found = read_state(self._bucket, self._prefix + labels[self._turn % len(labels)])
            return set() if found is None else {*found.state.tensors}
        return set()


def _is_name(value: object) -> bool:
    """Of a file of the output: some clients resolve `..` in a key, and another object would be deleted."""
    return isinstance(value, str) and fits_name(value)
