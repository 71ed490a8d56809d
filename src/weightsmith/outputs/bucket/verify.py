"""Is every byte of a checkpoint, in a bucket or a folder, what was written? Compares all of it with the manifest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from weightsmith.errors import Corrupt
from weightsmith.formats.carried import is_loaded
from weightsmith.outputs.bucket.client import UPLOADS
from weightsmith.outputs.bucket.contents import differences, manifest_of, names_in
from weightsmith.outputs.bucket.prefix import parse_prefix
from weightsmith.outputs.bucket.stores import open_bucket
from weightsmith.outputs.checksum import combine, hash_grains
from weightsmith.outputs.local.target import is_address
from weightsmith.outputs.local.verify import Verified
from weightsmith.outputs.local.verify import verify as verify_folder
from weightsmith.outputs.manifest import MANIFEST_NAME, Manifest
from weightsmith.outputs.reread import Progress

RANGE_BYTES = 16 << 20
"""Read at a time, by each of `UPLOADS` threads."""


def verify(folder: str | os.PathLike[str], *, threads: int = 2, progress: Progress | None = None) -> Verified:
    """See `outputs.hub.verify`, for a folder or an address in a bucket."""
    if not is_address(folder):
        return verify_folder(folder, threads=threads, progress=progress)
    address = parse_prefix(str(folder))
    bucket = open_bucket(address)
    manifest = manifest_of(bucket, address)

    def read(name: str, start: int, nbytes: int) -> bytes:
        return bucket.read_range(address.key(name), start, nbytes)

    return compare(str(address), manifest, names_in(bucket, address), read, progress)


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
    stray = present.keys() - {MANIFEST_NAME, *manifest.weights, *manifest.files}
    loadable = {name for name in stray if is_loaded(name)}
    problems = [f"{name}: is not of this checkpoint, and may be loaded with it" for name in sorted(loadable)]
    missing = {name for name in (*manifest.files, *manifest.weights) if name not in present}
    problems += [f"{name}: is missing" for name in sorted(missing)]
    problems += differences(manifest, present, read)
    problems += _tensor_problems(manifest, present, read, progress)
    if problems:
        raise Corrupt(
            f"{len(problems):,} problem{'s' if len(problems) > 1 else ''} found",
            where=where,
            details=problems,
            fix="restore these from a copy, or make the checkpoint again",
        )
    nbytes = sum(w.nbytes for w in manifest.weights.values()) + sum(f.nbytes for f in manifest.files.values())
    extra = tuple(sorted(stray - loadable))
    return Verified(where, manifest.plan, len(manifest.tensors), len(manifest.files), nbytes, extra)


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
    with ThreadPoolExecutor(UPLOADS) as pool:
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
