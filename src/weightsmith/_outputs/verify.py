"""Is every byte of an output what was written?"""

from __future__ import annotations

import os

from weightsmith._outputs.places import place_of
from weightsmith.abc.output import Progress, Verified


def verify(folder: str | os.PathLike[str], *, threads: int = 2, progress: Progress | None = None) -> Verified:
    """Re-read a checkpoint whole and compare it with its manifest.

    folder    a folder, or an address: `s3://bucket/prefix`, `hf://org/name[@branch]`
    threads   threads that read and hash, 4 MiB of memory each; of an address 8 read, 16 MiB each
    progress  called with (bytes of tensors done, in all)

    Raises Corrupt, whose details name every damaged tensor, header and file, every missing file, and files that are not of the
    checkpoint and that a loader would read (weights, adapters, a tokenizer); NotFound when there is no manifest, FormatError
    when weightsmith did not write it.
    """
    return place_of(folder).verify(threads=threads, progress=progress)
