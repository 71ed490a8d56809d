"""Compares the files of an output with its manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from weightsmith._base.errors import Corrupt
from weightsmith._files.copied import is_loaded
from weightsmith._outputs.checksum import combine, hash_bytes, hash_grains
from weightsmith._outputs.manifest import MANIFEST_NAME, Manifest
from weightsmith.abc.output import Progress, Verified

READS = 8
"""Threads that read from a server."""
RANGE_BYTES = 16 << 20
"""Read at a time, by each of them."""


def verdict(where: Path | str, manifest: Manifest, present: Collection[str], problems: Sequence[str]) -> Verified:
    """What `verify` returns. present: names of all files; problems: found in those of the manifest.

    Raises Corrupt if there are any, or a file that is not in the manifest and that a loader would read.
    """
    stray = {*present} - {MANIFEST_NAME, *manifest.weights, *manifest.files}
    loadable = {name for name in stray if is_loaded(name)}
    found = [*(f"{name}: is not of this checkpoint, and may be loaded with it" for name in sorted(loadable)), *problems]
    if found:
        raise Corrupt(
            f"{len(found):,} problem{'s' if len(found) > 1 else ''} found",
            where=str(where),
            details=found,
            fix="restore these from a copy, or make the checkpoint again",
        )
    nbytes = sum(weight.nbytes for weight in manifest.weights.values()) + sum(file.nbytes for file in manifest.files.values())
    extra = tuple(sorted(stray - loadable))
    return Verified(where, manifest.plan, len(manifest.tensors), len(manifest.files), nbytes, extra)


def compare(
    where: str,
    manifest: Manifest,
    present: Mapping[str, int],
    read: Callable[[str, int, int], bytes],
    progress: Progress | None,
) -> Verified:
    """Compare the files of an output elsewhere with its manifest; see `verify`.

    present  names and sizes of its files
    read     bytes of a file, from a byte on: fewer if it ends. Called from many threads
    """
    problems = [f"{name}: is missing" for name in sorted({*manifest.files, *manifest.weights} - present.keys())]
    problems += differences(manifest, present, read)
    problems += _tensor_problems(manifest, present, read, progress)
    return verdict(where, manifest, present, problems)


def _tensor_problems(
    manifest: Manifest, present: Mapping[str, int], read: Callable[[str, int, int], bytes], progress: Progress | None
) -> list[str]:
    total = sum(tensor.nbytes for tensor in manifest.tensors.values())
    done = 0
    lock = threading.Lock()

    def digests(place: tuple[str, int, int]) -> bytes:
        nonlocal done
        name, start, nbytes = place
        tensor = manifest.tensors[name]
        data = read(tensor.file, tensor.offset + start, nbytes) if nbytes else b""
        with lock:
            done += nbytes
            if progress is not None:
                progress(done, total)
        return hash_grains(data, tensor.grain_bytes)

    readable = [
        (name, tensor)
        for name, tensor in manifest.tensors.items()
        if present.get(tensor.file, -1) >= tensor.offset + tensor.nbytes
    ]
    problems = [
        f"tensor {name}: lost with {manifest.tensors[name].file}" for name in manifest.tensors.keys() - dict(readable).keys()
    ]
    places = [(name, *each) for name, tensor in readable for each in _ranges(tensor.nbytes, tensor.grain_bytes)]
    found: dict[str, list[bytes]] = {name: [] for name, _ in readable}
    with ThreadPoolExecutor(READS) as pool:
        for (name, _, _), runs in zip(places, pool.map(digests, places), strict=True):
            found[name].append(runs)
    for name, tensor in readable:
        if combine(b"".join(found[name])) != tensor.checksum:
            problems.append(f"tensor {name}: differs from what was written ({tensor.file})")
    return problems


def _ranges(nbytes: int, grain_bytes: int) -> Sequence[tuple[int, int]]:
    """Start and length of runs of whole grains."""
    step = grain_bytes * max(1, RANGE_BYTES // grain_bytes)
    return [(start, min(step, nbytes - start)) for start in range(0, nbytes, step)]


def differences(manifest: Manifest, present: Mapping[str, int], read: Callable[[str, int, int], bytes]) -> list[str]:
    """Where files elsewhere differ from those of a manifest, apart from the tensors: one line for each difference.

    present  names and sizes of the files; those that are missing are no difference
    read     bytes of a file, from a byte on: fewer if it ends
    """
    problems = []
    for name, file in manifest.files.items():
        if name in present:
            data = read(name, 0, max(1, file.nbytes)) if present[name] else b""
            if present[name] != file.nbytes or hash_bytes(data) != file.xxh3_128:
                problems.append(f"{name}: differs from what was written")
    for name, weight in manifest.weights.items():
        if name in present:
            if present[name] != weight.nbytes:
                problems.append(f"{name}: has {present[name]:,} bytes, not the {weight.nbytes:,} that were written")
            header = read(name, 0, weight.header_bytes)
            if hash_bytes(header) != weight.header_xxh3_128:
                problems.append(f"{name}: its header differs from what was written")
    return problems
