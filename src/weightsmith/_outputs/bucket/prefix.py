"""Addresses of outputs: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError
from weightsmith._files.remote.addresses import parse_address
from weightsmith._outputs.local.area import STAGING_SUFFIX
from weightsmith._outputs.local.target import absolute
from weightsmith.abc.output import Capabilities

CAPABILITIES = Capabilities(in_order=False, copies=True, publication="requests", parts=True, shared_locks=False)
_MAX_PREFIX_BYTES = 700  # of 1,024 of a key


@dataclass(frozen=True, slots=True)
class Prefix:
    """An output in a bucket, or a folder of outputs: the objects whose keys start with `prefix` and a slash.

    scheme  of the store
    prefix  without a slash at either end; "" for the whole bucket

    >>> address = parse_prefix("s3://models/llama/merged/")
    >>> str(address), address.name, address.staging
    ('s3://models/llama/merged', 'merged', 'llama/.merged.weightsmith-staging')
    """

    scheme: str
    bucket: str
    prefix: str
    capabilities = CAPABILITIES
    spec = url = ""

    @property
    def name(self) -> str:
        """The last part of the prefix."""
        return self.prefix.rpartition("/")[2]

    @property
    def absolute(self) -> str:
        """The address."""
        return str(self)

    @property
    def local(self) -> Path:
        """A name in the current folder, which no other address has."""
        return absolute(f"{self.name}-{hashlib.sha256(str(self).encode()).hexdigest()[:8]}")

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
        return f"{self.scheme}://{self.bucket}/{key}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    def __fspath__(self) -> str:
        return str(self)


def parse_prefix(text: str, *, folder: bool = False) -> Prefix:
    """The prefix that an address names. folder: it may be a whole bucket.

    Raises StoreError for one that no output can have, ParameterError for what no address may hold.
    """
    place = parse_address(text)
    if not place.path and not folder:
        raise _refused(text, "it is a whole bucket", f"write {place.scheme}://{place.host}/prefix")
    if len(place.path.encode()) > _MAX_PREFIX_BYTES:
        raise _refused(text, f"the prefix is longer than {_MAX_PREFIX_BYTES} bytes", "choose a shorter one")
    return Prefix(place.scheme, place.host, place.path)


def _refused(text: str, reason: str, fix: str) -> StoreError:
    scheme, mark, rest = text.partition("?")[0].partition("://")
    shown = scheme + mark + rest.rpartition("@")[2]  # no key or password in a message
    return StoreError(f"cannot be the output: {reason}", where=shown, fix=fix, state=NOTHING_WRITTEN)
