"""Addresses of outputs: `s3://bucket/prefix`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weightsmith.errors import NOTHING_WRITTEN, StoreError
from weightsmith.store.area import STAGING_SUFFIX

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_MAX_PREFIX_BYTES = 700  # of 1,024 of a key
_INSTEAD = {
    "gs": "write to a local folder, and copy it: `gcloud storage cp -r`",
    "az": "write to a local folder, and copy it: `az storage blob upload-batch`",
    "hf": "write to a local folder, and upload it with --push ORG/NAME",
}


@dataclass(frozen=True, slots=True)
class Address:
    """An output in a bucket, or a folder of outputs: the objects whose keys start with `prefix` and a slash.

    prefix  without a slash at either end; "" for the whole bucket

    >>> address = parse_address("s3://models/llama/merged/")
    >>> str(address), address.name, address.staging
    ('s3://models/llama/merged', 'merged', 'llama/.merged.weightsmith-staging')
    """

    bucket: str
    prefix: str

    @property
    def name(self) -> str:
        """The last part of the prefix."""
        return self.prefix.rpartition("/")[2]

    @property
    def staging(self) -> str:
        """The prefix of the lock and the journal of unfinished work, next to the output."""
        parent, slash, name = self.prefix.rpartition("/")
        return f"{parent}{slash}.{name}{STAGING_SUFFIX}"

    def key(self, name: str) -> str:
        """The key of a file of the output."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def shown(self, key: str) -> str:
        """A key of the same bucket, for messages."""
        return f"s3://{self.bucket}/{key}"

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def parse_address(text: str, *, folder: bool = False) -> Address:
    """The address in a text. folder: it may be a whole bucket. Raises StoreError, also for stores that are not written to."""
    scheme, _, rest = text.partition("://")
    if scheme.lower() != "s3":
        raise _refused(
            text,
            f"weightsmith does not write to {scheme}://",
            _INSTEAD.get(scheme.lower(), "write to a local folder, or to s3://bucket/prefix"),
        )
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    fix = "write s3://bucket/prefix"
    if not _BUCKET.fullmatch(bucket):
        raise _refused(text, f"{bucket!r} is not the name of a bucket", fix)
    if not prefix and not folder:
        raise _refused(text, "it is a whole bucket", fix)
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        raise _refused(text, "a prefix has no empty, '.' or '..' parts", fix)
    if not prefix.isprintable() or "\\" in prefix or len(prefix.encode(errors="replace")) > _MAX_PREFIX_BYTES:
        raise _refused(text, "the prefix is too long, or has a backslash or a control character", "choose another prefix")
    return Address(bucket, prefix)


def _refused(text: str, reason: str, fix: str) -> StoreError:
    return StoreError(f"cannot be the output: {reason}", where=text, fix=fix, state=NOTHING_WRITTEN)
