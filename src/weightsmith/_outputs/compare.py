"""Compares the files of an output with its manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import xxhash

from weightsmith._base.errors import CheckpointError, Corrupt, NotFound
from weightsmith._files.copied import is_loaded
from weightsmith._outputs.checksum import hash_bytes
from weightsmith._outputs.manifest import MANIFEST_NAME, Manifest
from weightsmith._outputs.reread import Stored, reread
from weightsmith.abc.output import Progress, Verified

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
            stored.append(Stored(name, partial(read, tensor.file), tensor.offset, tensor.nbytes, tensor.grain_bytes))
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
