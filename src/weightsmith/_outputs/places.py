"""Finds where an output is: a local folder, an address in a bucket, a model on the Hub."""

from __future__ import annotations

import os

from weightsmith._outputs.bucket.place import bucket_place
from weightsmith._outputs.hub.address import is_hub_address
from weightsmith._outputs.hub.place import hub_place
from weightsmith._outputs.local.place import LocalFolder
from weightsmith._outputs.local.target import is_address
from weightsmith._outputs.staging import Staging
from weightsmith.abc.output import OutputSpec, Place


def place_of(out: str | os.PathLike[str]) -> Place:
    """The place of an output. Reads nothing.

    Raises StoreError (PushFailed) for an address that no output can have; a local path is checked when it is used.

    >>> [place_of(out).name for out in ("models/merged", "s3://bucket/models/merged", "hf://org/merged@v2")]
    ['merged', 'merged', 'merged']
    """
    if is_hub_address(out):
        return hub_place(str(out))
    return bucket_place(str(out)) if is_address(out) else LocalFolder(os.fspath(out))


def open_output(out: str | os.PathLike[str], spec: OutputSpec) -> Staging:
    """Open an output that is to be built: see `Staging.open`."""
    return Staging.open(place_of(out).backend(spec), spec)
