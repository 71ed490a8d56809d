"""`weightsmith.json`: a list of everything that was written, with checksums. Written last; `compare` checks the files.

The file is plain JSON. Its first key is a checksum of all bytes after that line, so damage to the manifest itself is detected.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from json.encoder import encode_basestring as quote
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from weightsmith._base.errors import CheckpointError, Corrupt, FormatError, NotFound, StoreError, Unsupported
from weightsmith._base.files import read_bounded, show
from weightsmith._base.strict_json import parse
from weightsmith._files.containers import MAX_HEADER_BYTES, Layout
from weightsmith._files.copied import is_loaded
from weightsmith._outputs.checksum import StoredBytes, grain_bytes, hash_bytes, reread
from weightsmith.abc.output import Finished, OtherFile, Progress, Verified

MANIFEST_NAME = "weightsmith.json"
MAX_MANIFEST_BYTES = 128 << 20  # 100,000 tensors take 20 MB
_MAX_MEMORY = 800 << 20  # a manifest of 128 MiB takes half of that
VERSION = 1
_PIECE_BYTES = 1 << 20
_OWN_KEYS = ("checksum", "weightsmith_manifest", "plan", "weights", "files", "tensors")
_AGAIN = "restore it from a copy, or create the checkpoint again"
_DIGEST = re.compile("[0-9a-f]{32}")
_HEAD = b'{\n  "checksum": "%b",\n'
_FIRST = re.compile(rb'\{\n  "checksum": "([0-9a-f]{32})",\n')


@dataclass(frozen=True, slots=True)
class WeightFileRecord:
    """A weight file: its size, and the size and xxh3_128 of its header (length, JSON and padding)."""

    nbytes: int
    header_bytes: int
    header_xxh3_128: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor: its weight file, place, grain and checksum (see `weightsmith._outputs.checksum`)."""

    file: str
    offset: int
    nbytes: int
    grain_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest with a valid checksum.

    data  all of the JSON, including the caller's keys (recipe, inputs, versions)
    """

    plan: str
    weights: dict[str, WeightFileRecord]
    files: dict[str, OtherFile]
    tensors: dict[str, TensorRecord]
    data: dict[str, Any]

    @property
    def names(self) -> frozenset[str]:
        """The files of the output."""
        return frozenset((MANIFEST_NAME, *self.weights, *self.files))


def encode_manifest(
    layout: Layout,
    plan_hash: str,
    tensors: Mapping[str, Finished],
    files: Mapping[str, OtherFile],
    extra: Mapping[str, Any],
) -> bytearray:
    """The bytes of the manifest. extra: the caller's JSON values, under keys that the store does not use."""
    taken = [key for key in extra if key in _OWN_KEYS]
    if taken:
        what = f"the manifest's own keys cannot be given: {', '.join(taken)}"
        raise StoreError(what, where=MANIFEST_NAME, fix="rename them")
    fields: dict[str, Any] = {"weightsmith_manifest": VERSION, "plan": plan_hash, **extra}
    text = json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False)
    # One record per line, formatted here: a tenth of the lines of json's indent, and 0.3 s instead of 8 s for 100,000 tensors.
    weights = (
        f'{quote(shard.name)}: {{"bytes": {shard.nbytes}, "header_bytes": {len(shard.header)}, '
        f'"header_xxh3_128": "{hash_bytes(shard.header)}"}}'
        for shard in layout.shards
    )
    others = (f'{quote(name)}: {{"bytes": {f.nbytes}, "xxh3_128": "{f.xxh3_128}"}}' for name, f in sorted(files.items()))
    records = (
        f'{quote(spec.name)}: {{"file": "{shard.name}", "offset": {place.offset}, "bytes": {place.nbytes}, '
        f'"grain_bytes": {grain_bytes(spec)}, "checksum": "{tensors[spec.name].checksum}"}}'
        for shard in layout.shards
        for spec in shard.tensors
        for place in (layout.places[spec.name],)
    )
    # Put together where it stays: the records of 70,000 tensors take 15 MB, and each copy as much.
    data = bytearray(_HEAD % hash_bytes(b"").encode())
    first = len(data)
    data += text[2:-2].encode()  # without its braces
    for name, lines in (("weights", weights), ("files", others), ("tensors", records)):
        _add_table(data, name, lines)
    data += b"\n}\n"
    with memoryview(data) as view:
        checksum = hash_bytes(view[first:])
    data[:first] = _HEAD % checksum.encode()
    return data


def _add_table(data: bytearray, name: str, lines: Iterable[str]) -> None:
    data += f',\n  "{name}": {{'.encode()
    before = b"\n    "
    for line in lines:
        data += before
        data += line.encode()
        before = b",\n    "
    data += b"}" if before == b"\n    " else b"\n  }"


def decode_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in these bytes.

    Raises Corrupt if they do not match their checksum, Unsupported for another version, FormatError if weightsmith did not
    write them.
    """
    first = _FIRST.match(data)
    if first is None or first.group(1).decode() != hash_bytes(data[first.end() :]):
        what = "the manifest itself is damaged or was edited: it does not match its own checksum"
        raise Corrupt(what, where=where, fix=_AGAIN)
    try:
        fields = parse(data, max_memory=_MAX_MEMORY)
        version = fields["weightsmith_manifest"]
        if version != VERSION or isinstance(version, bool):
            what = f"manifest version {show(version)}; this weightsmith reads {VERSION}"
            raise Unsupported(what, where=where, fix="use the version of weightsmith that wrote the checkpoint")
        manifest = Manifest(
            plan=_text(fields["plan"]),
            weights={
                name: WeightFileRecord(_count(w["bytes"]), _count(w["header_bytes"]), _digest(w["header_xxh3_128"]))
                for name, w in fields["weights"].items()
            },
            files={name: OtherFile(_count(f["bytes"]), _digest(f["xxh3_128"])) for name, f in fields["files"].items()},
            tensors={
                name: TensorRecord(
                    _text(t["file"]), _count(t["offset"]), _count(t["bytes"]), _count(t["grain_bytes"]), _digest(t["checksum"])
                )
                for name, t in fields["tensors"].items()
            },
            data=fields,
        )
        fits = _fits(manifest)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {show(str(error))}"
        raise FormatError(f"not a manifest of weightsmith ({reason})", where=where, fix=_AGAIN) from error
    if not fits:
        what = "the manifest names files outside the folder, names that no file can have, or bytes outside the files"
        raise FormatError(what, where=where, fix=_AGAIN)
    return manifest


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{show(value)} is not a string")
    return value


def _digest(value: Any) -> str:
    if not _DIGEST.fullmatch(_text(value)):
        raise ValueError(f"{show(value)} is not a checksum of 32 hex digits")
    return str(value)


def _count(value: Any) -> int:
    """A possible number of bytes of a file."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{show(value)} is not a number of bytes")
    return value


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a folder. Raises NotFound, CheckpointError, and the errors of `decode_manifest`."""
    path = folder / MANIFEST_NAME
    return decode_manifest(read_bounded(path, MAX_MANIFEST_BYTES), str(path))


def _fits(manifest: Manifest) -> bool:
    """False for names or sizes that no manifest of ours has. A hostile manifest with a valid checksum is possible."""
    if any(not fits_name(name) for name in (*manifest.weights, *manifest.files)):
        return False
    if any(not 0 <= w.header_bytes <= min(w.nbytes, MAX_HEADER_BYTES + 8) for w in manifest.weights.values()):
        return False
    return all(
        t.file in manifest.weights and t.grain_bytes > 0 and t.offset + t.nbytes <= manifest.weights[t.file].nbytes
        for t in manifest.tensors.values()
    )


def fits_name(name: str) -> bool:
    """True for a relative path that file systems accept."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        return False
    try:
        return all(len(part.encode()) < 256 for part in path.parts) and len(path.parts) < 64
    except UnicodeEncodeError:  # a lone surrogate
        return False


def check_file_name(name: str) -> PurePosixPath:
    """The relative path of a file that is not a weight. Raises StoreError if it leaves the folder or looks like a weight file.

    >>> check_file_name("1_Pooling/config.json")
    PurePosixPath('1_Pooling/config.json')
    """
    parts = name.split("/")
    problem = ""
    if not name or any(part in ("", ".", "..") for part in parts):
        problem = "it must be a relative path without empty, '.' or '..' parts"
    elif "\\" in name or "\0" in name or not name.isprintable():
        problem = "it holds a backslash or a control character"
    elif parts[-1].endswith((".safetensors", ".safetensors.index.json")):
        problem = "weight files and their index are written from the layout"
    elif name == MANIFEST_NAME:
        problem = "the manifest is written by publish"
    if problem:
        raise StoreError(f"{name!r} cannot be the name of a file in the output: {problem}", where="file name")
    return PurePosixPath(name)


def hash_file(path: Path) -> OtherFile:
    """Size and xxh3_128 of a file, read in bounded pieces."""
    hasher = xxhash.xxh3_128()
    nbytes = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
            nbytes += len(piece)
    return OtherFile(nbytes, hasher.hexdigest())


def list_files(folder: Path) -> list[str]:
    """Relative names of everything in a folder except folders. Links to folders are listed, not followed."""
    names = []
    for root, folders, files in os.walk(folder):
        here = Path(root)
        links = [name for name in folders if (here / name).is_symlink()]
        names += [(here / name).relative_to(folder).as_posix() for name in [*files, *links]]
    return sorted(names)


READS = 8
"""Threads that read from a server."""
RANGE_BYTES = 16 << 20
"""Read at a time, by each of them."""

Read = Callable[[str, int, int], bytes | memoryview]
"""Bytes of a file, from a byte on: fewer if it ends. Called from many threads."""
Present = Mapping[str, int | str]
"""The files of an output: their sizes, or why one cannot be read."""


def compare(
    where: Path | str,
    manifest: Manifest,
    present: Present,
    read: Read,
    progress: Progress | None,
    *,
    threads: int = READS,
    piece_bytes: int = RANGE_BYTES,
) -> Verified:
    """Compare the files of an output with its manifest: what `verify` returns.

    Raises Corrupt if any differs or is missing, or if there is one that is not in the manifest and that a loader would read.
    """
    stray = present.keys() - manifest.names
    loadable = {name for name in stray if is_loaded(name)}
    problems = [f"{name}: is not of this checkpoint, and may be loaded with it" for name in sorted(loadable)]
    problems += [f"{name}: is missing" for name in sorted({*manifest.files, *manifest.weights} - present.keys())]
    problems += differences(manifest, present, read)
    problems += damaged(manifest, present, read, progress, threads=threads, piece_bytes=piece_bytes)
    if problems:
        what = f"{len(problems):,} problem{'s' if len(problems) > 1 else ''} found"
        raise Corrupt(what, where=str(where), details=problems, fix="restore these from a copy, or make the checkpoint again")
    nbytes = sum(weight.nbytes for weight in manifest.weights.values()) + sum(file.nbytes for file in manifest.files.values())
    extra = tuple(sorted(stray - loadable))
    return Verified(where, manifest.plan, len(manifest.tensors), len(manifest.files), nbytes, extra)


def differences(manifest: Manifest, present: Present, read: Read) -> list[str]:
    """Where files differ from those of a manifest, apart from the tensors: one line for each difference.

    present  those that are missing are no difference
    """
    problems = []
    sizes = {name: file.nbytes for name, file in manifest.files.items()}
    sizes |= {name: weight.nbytes for name, weight in manifest.weights.items()}
    for name, nbytes in sizes.items():
        if name not in present:
            continue
        size, weight = present[name], manifest.weights.get(name)
        if isinstance(size, str):
            problems.append(f"{name}: {size}")
            continue
        if size != nbytes:
            problems.append(f"{name}: has {size:,} bytes, not the {nbytes:,} that were written")
        try:
            if weight is not None:
                if hash_bytes(read(name, 0, weight.header_bytes) if size else b"") != weight.header_xxh3_128:
                    problems.append(f"{name}: its header differs from what was written")
            elif size == nbytes and _hash(partial(read, name), nbytes) != manifest.files[name].xxh3_128:
                problems.append(f"{name}: differs from what was written")
        except OSError as error:
            problems.append(f"{name}: cannot be read ({error.strerror})")
    return problems


def _hash(read: Callable[[int, int], bytes | memoryview], nbytes: int) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, nbytes, RANGE_BYTES):
        digest.update(read(start, min(RANGE_BYTES, nbytes - start)))
    return digest.hexdigest()


def damaged(
    manifest: Manifest, present: Present, read: Read, progress: Progress | None = None, *, threads: int, piece_bytes: int
) -> list[str]:
    """The tensors that are not what was written: one line for each."""
    stored, problems = [], []
    for name, tensor in manifest.tensors.items():
        size = present.get(tensor.file, "is missing")
        if isinstance(size, str):
            problems.append(f"tensor {name}: lost with {tensor.file}")
        elif tensor.nbytes and size < tensor.offset + tensor.nbytes:
            problems.append(f"tensor {name}: differs from what was written ({tensor.file})")
        else:
            stored.append(StoredBytes(name, partial(read, tensor.file), tensor.offset, tensor.nbytes, tensor.grain_bytes))
    checksums = reread(stored, threads=threads, progress=progress, piece_bytes=piece_bytes)
    for name, checksum in checksums.items():
        tensor = manifest.tensors[name]
        if checksum != tensor.checksum:
            problems.append(f"tensor {name}: differs from what was written ({tensor.file})")
    return problems


def check_ours(
    manifest: Callable[[], Manifest],
    unlisted: Callable[[Manifest], Sequence[str]],
    changed: Callable[[Manifest], Sequence[str]],
    refused: Callable[[str, Sequence[str]], Exception],
) -> Manifest:
    """The manifest of an output that holds what weightsmith has written, and nothing else.

    manifest  reads it
    unlisted  the first few names of files that are not in it
    changed   where the files in it are not what was written
    refused   the error for any other output: why it is not ours, and what would be lost
    """
    try:
        ours = manifest()
    except NotFound:
        raise refused(f"weightsmith did not make it: it has no {MANIFEST_NAME}", ()) from None
    except (CheckpointError, Corrupt) as error:
        raise refused(f"its {MANIFEST_NAME} cannot be used: {error.finding.what}", ()) from error
    if lost := unlisted(ours):
        raise refused("it holds files that weightsmith did not write, and these would be lost", lost)
    if lost := changed(ours):
        raise refused("files in it were changed after weightsmith wrote them, and these changes would be lost", lost)
    return ours
