"""`weightsmith.json`: what was written, and the checksum of all of it. Written last, read by verify.

The file is plain JSON. Its first key is a checksum of every byte that follows that line, so damage to the manifest
itself shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring as quote
from pathlib import PurePosixPath
from typing import Any

from weightsmith.errors import Corrupt, FormatError, StoreError, Unsupported
from weightsmith.store.checksum import grain_bytes, hash_bytes
from weightsmith.store.layout import MAX_HEADER_BYTES, Layout

MANIFEST_NAME = "weightsmith.json"
VERSION = 1
_OWN_KEYS = ("checksum", "weightsmith_manifest", "plan", "weights", "files", "tensors")
_FIRST = re.compile(rb'\{\n  "checksum": "([0-9a-f]{32})",\n')


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A weight file: its size, and the size and xxh3_128 of its header (length, JSON and padding)."""

    nbytes: int
    header_bytes: int
    header_xxh3_128: str


@dataclass(frozen=True, slots=True)
class OtherFile:
    """Any other file: its size and xxh3_128."""

    nbytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor: its weight file, place, grain and checksum (see `weightsmith.store.checksum`)."""

    file: str
    offset: int
    nbytes: int
    grain_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that was read and whose own checksum is right.

    data  all of the JSON, with what the writer added (recipe, inputs, versions)
    """

    plan: str
    weights: dict[str, WeightFile]
    files: dict[str, OtherFile]
    tensors: dict[str, TensorRecord]
    data: dict[str, Any]


def encode_manifest(
    layout: Layout,
    plan_hash: str,
    checksums: Mapping[str, str],
    files: Mapping[str, OtherFile],
    more: Mapping[str, Any],
) -> bytes:
    """The bytes of the manifest. `more` is the caller's: any JSON under keys that are not the store's own."""
    taken = [key for key in more if key in _OWN_KEYS]
    if taken:
        raise StoreError(f"the manifest's own keys cannot be given: {', '.join(taken)}", where=MANIFEST_NAME)
    fields: dict[str, Any] = {"weightsmith_manifest": VERSION, "plan": plan_hash, **more}
    text = json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False)
    # One line a record, made by hand: readable, a tenth of the lines of json's indent, 0.3 s for 100,000 tensors and not 8.
    weights = [
        f'{quote(shard.name)}: {{"bytes": {shard.nbytes}, "header_bytes": {len(shard.header)}, '
        f'"header_xxh3_128": "{hash_bytes(shard.header)}"}}'
        for shard in layout.shards
    ]
    others = [f'{quote(name)}: {{"bytes": {f.nbytes}, "xxh3_128": "{f.xxh3_128}"}}' for name, f in sorted(files.items())]
    tensors = []
    for shard in layout.shards:
        for spec in shard.tensors:
            _, offset, nbytes = layout.places[spec.name]
            tensors.append(
                f'{quote(spec.name)}: {{"file": "{shard.name}", "offset": {offset}, "bytes": {nbytes}, '
                f'"grain_bytes": {grain_bytes(spec)}, "checksum": "{checksums[spec.name]}"}}'
            )
    tables = ",\n".join([_table("weights", weights), _table("files", others), _table("tensors", tensors)])
    body = (text[2:-2] + ",\n" + tables + "\n}\n").encode()  # text without its braces
    return b'{\n  "checksum": "' + hash_bytes(body).encode() + b'",\n' + body


def _table(name: str, lines: Sequence[str]) -> str:
    inner = "".join(["\n    ", ",\n    ".join(lines), "\n  "]) if lines else ""
    return f'  "{name}": {{{inner}}}'


def decode_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in these bytes.

    Raises Corrupt when they are not those that were written, Unsupported for a manifest of another version, FormatError
    for one that weightsmith did not make.
    """
    first = _FIRST.match(data)
    if first is None or first.group(1).decode() != hash_bytes(data[first.end() :]):
        raise Corrupt(
            "the manifest itself is damaged or was edited: it does not match its own checksum",
            where=where,
            fix="restore it from a copy, or make the checkpoint again",
        )
    try:
        fields = json.loads(data)
        version = fields["weightsmith_manifest"]
        if version != VERSION:
            raise Unsupported(f"manifest version {version!r}; this weightsmith reads {VERSION}", where=where)
        manifest = Manifest(
            plan=str(fields["plan"]),
            weights={
                name: WeightFile(w["bytes"], w["header_bytes"], w["header_xxh3_128"]) for name, w in fields["weights"].items()
            },
            files={name: OtherFile(f["bytes"], f["xxh3_128"]) for name, f in fields["files"].items()},
            tensors={
                name: TensorRecord(t["file"], t["offset"], t["bytes"], t["grain_bytes"], t["checksum"])
                for name, t in fields["tensors"].items()
            },
            data=fields,
        )
        fits = _fits(manifest)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise FormatError(f"not a manifest of weightsmith: {error!r}", where=where) from error
    if not fits:
        raise FormatError("the manifest names files outside the folder, or bytes outside the files", where=where)
    return manifest


def _fits(manifest: Manifest) -> bool:
    """False for a manifest made by someone else to lead a reader astray: nothing in it is believed."""
    names = [PurePosixPath(name) for name in (*manifest.weights, *manifest.files)]
    if any(name.is_absolute() or ".." in name.parts for name in names):
        return False
    if any(not 0 <= w.header_bytes <= min(w.nbytes, MAX_HEADER_BYTES + 8) for w in manifest.weights.values()):
        return False
    return all(
        t.file in manifest.weights
        and t.grain_bytes > 0
        and min(t.offset, t.nbytes) >= 0
        and t.offset + t.nbytes <= manifest.weights[t.file].nbytes
        for t in manifest.tensors.values()
    )
