"""Finds where an output is: a local folder, or an address in a bucket, on the Hub, or of a scheme that a package brings."""

from __future__ import annotations

import os

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError, UnknownName
from weightsmith._base.plugins import Plugins
from weightsmith._outputs.local.place import LocalTarget
from weightsmith._outputs.local.target import is_address
from weightsmith._outputs.staging import Staging
from weightsmith.abc.output import OutputScheme, OutputSpec, Progress, Target, Verified

SCHEMES = Plugins(
    "scheme of outputs",
    "weightsmith.outputs",
    OutputScheme,
    {
        "hf": "weightsmith._outputs.hub.target:SCHEME",
        "s3": "weightsmith._outputs.bucket:SCHEME",
        "gs": "weightsmith._outputs.bucket:SCHEME",
        "az": "weightsmith._outputs.bucket:SCHEME",
    },
)
"""The places of outputs by the scheme of their addresses, imported when an output has one."""


def place_of(out: str | os.PathLike[str]) -> Target:
    """The target of an output. Reads nothing.

    Raises StoreError (PushFailed) for an address that no output can have; a local path is checked when it is used.

    >>> [place_of(out).name for out in ("models/merged", "s3://bucket/models/merged", "hf://org/merged@v2")]
    ['merged', 'merged', 'merged']
    """
    return scheme_of(str(out)).target(str(out)) if is_address(out) else LocalTarget(os.fspath(out))


def scheme_of(address: str) -> OutputScheme:
    """The scheme of an address. Raises StoreError for one that is not written to, and PluginError."""
    scheme, _, rest = address.partition("://")
    try:
        return SCHEMES.get(scheme.lower())
    except UnknownName as error:
        shown = f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"  # no key or password in a message
        fix = f"write to a local folder, or to {', '.join(f'{name}://' for name in SCHEMES.names)}"
        what = f"cannot be the output: {error.finding.what}"
        raise StoreError(what, where=shown, fix=fix, state=NOTHING_WRITTEN) from None


def open_output(out: str | os.PathLike[str], spec: OutputSpec) -> Staging:
    """Open an output that is to be built: see `Staging.open`."""
    return Staging.open(place_of(out), spec)


def verify(folder: str | os.PathLike[str], *, threads: int = 2, progress: Progress | None = None) -> Verified:
    """Compare every byte of a checkpoint with its manifest.

    folder    a folder, or an address: `s3://bucket/prefix`, `hf://org/name[@branch]`
    threads   threads that read and hash, with 4 MiB of memory each; an address is read by 8, with 16 MiB each
    progress  called with (bytes of tensors done, bytes of all tensors)

    Raises Corrupt. Its details name every damaged tensor, header and file, and every missing file. They also name foreign
    files that a loader would read: weights, adapters, a tokenizer. Raises NotFound if there is no manifest, and FormatError if
    weightsmith did not write it.
    """
    return place_of(folder).verify(threads=threads, progress=progress)
