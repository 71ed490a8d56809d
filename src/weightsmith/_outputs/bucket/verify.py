"""Is every byte of an output in a bucket what was written?"""

from __future__ import annotations

from weightsmith._outputs.bucket.contents import manifest_of, names_in
from weightsmith._outputs.bucket.prefix import Prefix
from weightsmith._outputs.bucket.stores import open_bucket
from weightsmith._outputs.compare import compare
from weightsmith.abc.output import Progress, Verified


def verify_bucket(address: Prefix, progress: Progress | None) -> Verified:
    """See `outputs.verify`."""
    bucket = open_bucket(address)
    manifest = manifest_of(bucket, address)

    def read(name: str, start: int, nbytes: int) -> bytes:
        return bucket.read_range(address.key(name), start, nbytes)

    return compare(str(address), manifest, names_in(bucket, address), read, progress)
