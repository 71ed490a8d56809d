"""Finds the work of interrupted runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weightsmith._base.errors import NotFound
from weightsmith._base.files import is_folder
from weightsmith._outputs.local.target import is_address
from weightsmith._outputs.local.unfinished import find_folders
from weightsmith._outputs.places import scheme_of
from weightsmith.abc.output import Unfinished


def find_unfinished(where: str) -> Iterator[Unfinished]:
    """The unfinished work for outputs in a folder, or at an address: under a prefix of a bucket, for a model on the Hub.

    Nothing is changed, and no lock is held afterwards. Raises NotFound, StoreError.
    """
    if is_address(where):
        yield from scheme_of(where).unfinished(where)
    elif is_folder(Path(where)):
        yield from find_folders(Path(where))
    else:
        raise NotFound("no such folder", where=where, fix="write the folder that the output folder is in")
