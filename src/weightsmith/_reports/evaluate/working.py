"""Where an evaluation keeps its unfinished work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from weightsmith._base.errors import StoreError
from weightsmith._base.options import EvaluateSettings, named

_OUTPUT = ("choose another output folder", "write to another disk")


@contextmanager
def work_folder(settings: EvaluateSettings, name: str) -> Iterator[Path]:
    """The folder of this name for unfinished work. A StoreError of the block says how to choose another place for it."""
    try:
        yield Path(settings.work or ".") / f"evaluation-{name}"
    except StoreError as error:
        own = "choose another folder for unfinished work" + ("" if settings.work else f" with {named('work')}")
        fix = error.finding.fix
        for text in _OUTPUT:
            fix = fix.replace(text, own).replace(text.capitalize(), own.capitalize())
        error.finding = replace(error.finding, fix=fix)
        raise
