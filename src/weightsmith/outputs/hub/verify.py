"""Is every byte of an output what was written? Of one on the Hub here; of a folder or one in a bucket, see `bucket.verify`."""

from __future__ import annotations

import os
from functools import cache

from weightsmith.errors import NotFound
from weightsmith.hub import UNKNOWN, open_repository
from weightsmith.outputs.bucket import verify as elsewhere
from weightsmith.outputs.hub.address import is_hub_address, parse_hub_address
from weightsmith.outputs.hub.contents import ATTRIBUTES
from weightsmith.outputs.local.verify import Verified
from weightsmith.outputs.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, decode_manifest
from weightsmith.outputs.reread import Progress
from weightsmith.remote.files import RemoteFile


def verify(folder: str | os.PathLike[str], *, threads: int = 2, progress: Progress | None = None) -> Verified:
    """Re-read a checkpoint whole and compare it with its manifest.

    folder    a folder, or an address: `s3://bucket/prefix`, `hf://org/name[@branch]`
    threads   threads that read and hash, 4 MiB of memory each; of an address 8 read, 16 MiB each
    progress  called with (bytes of tensors done, in all)

    Raises Corrupt, whose details name every damaged tensor, header and file, every missing file, and files that are not of the
    checkpoint and that a loader would read (weights, adapters, a tokenizer); NotFound when there is no manifest, FormatError
    when weightsmith did not write it.
    """
    if not is_hub_address(folder):
        return elsewhere.verify(folder, threads=threads, progress=progress)
    address = parse_hub_address(str(folder))
    repository = open_repository(address.repo, address.branch)
    present = {name: nbytes for name, nbytes in repository.sizes.items() if name != ATTRIBUTES}
    if UNKNOWN in present.values():
        fix = "download the model, and verify its folder"
        raise NotFound("the hub does not list the sizes of the files", where=str(address), fix=fix)
    where = f"{address}/{MANIFEST_NAME}"
    if present.get(MANIFEST_NAME, MAX_MANIFEST_BYTES + 1) > MAX_MANIFEST_BYTES:
        fix = "name a model that weightsmith wrote"
        raise NotFound("there is no manifest, so nothing to compare with", where=where, fix=fix)

    @cache
    def file(name: str) -> RemoteFile:
        return RemoteFile(repository.ranges(name))

    def read(name: str, start: int, nbytes: int) -> bytes:
        data = bytearray(max(0, min(nbytes, present[name] - start)))
        file(name).read_into(start, memoryview(data))
        return bytes(data)

    manifest = decode_manifest(read(MANIFEST_NAME, 0, present[MANIFEST_NAME]), where)
    return elsewhere.compare(str(address), manifest, present, read, progress)
