"""Finds the work of interrupted runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weightsmith._base.errors import NotFound
from weightsmith._base.files import is_folder
from weightsmith._outputs.bucket.prefix import parse_prefix
from weightsmith._outputs.bucket.unfinished import find_uploads
from weightsmith._outputs.hub.address import is_hub_address, parse_hub_address
from weightsmith._outputs.local.target import is_address
from weightsmith._outputs.local.unfinished import find_folders
from weightsmith.abc.output import Unfinished


def find_unfinished(where: str) -> Iterator[Unfinished]:
    """The unfinished work for outputs in a folder, for outputs under a prefix of a bucket, or for a model on the Hub.

    Nothing is changed, and no lock is held afterwards. Raises NotFound, StoreError.
    """
    if is_hub_address(where):
        path = parse_hub_address(where).local
        yield from (each for each in find_folders(Path()) if str(each.out).startswith(path.name))
    elif is_address(where):
        yield from find_uploads(parse_prefix(where, folder=True))
    elif is_folder(Path(where)):
        yield from find_folders(Path(where))
    else:
        raise NotFound("no such folder", where=where, fix="write the folder that the output folder is in")
