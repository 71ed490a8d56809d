"""Is every byte of a model on the Hub what was written?"""

from __future__ import annotations

from functools import cache

from weightsmith._base.errors import NotFound
from weightsmith._files.hub import UNKNOWN, open_repository
from weightsmith._files.remote.files import RemoteFile
from weightsmith._outputs.compare import compare
from weightsmith._outputs.hub.address import HubAddress
from weightsmith._outputs.hub.contents import ATTRIBUTES
from weightsmith._outputs.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, decode_manifest
from weightsmith.abc.output import Progress, Verified


def verify_hub(address: HubAddress, progress: Progress | None) -> Verified:
    """See `outputs.verify`."""
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
    return compare(str(address), manifest, present, read, progress)
