"""Where an evaluation keeps its unfinished work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from weightsmith._base.errors import NOTHING_WRITTEN, StoreError
from weightsmith._base.installation import cache_home
from weightsmith._base.options import named
from weightsmith._outputs.local.target import remove_checkpoint
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._outputs.places import find_unfinished
from weightsmith._reports.evaluate.options import EvaluateSettings
from weightsmith.abc.output import Unfinished

_OUTPUT = ("choose another output folder", "write to another disk")


PREFIX = "evaluation-"


def evaluations_folder() -> Path:
    """Where evaluations keep their unfinished work unless the user names a folder. Raises StoreError without a home."""
    try:
        return cache_home() / "evaluations"
    except RuntimeError as error:
        what, fix = f"no folder for unfinished work: {error}", f"name one with {named('work')}"
        raise StoreError(what, where="evaluate", fix=fix, state=NOTHING_WRITTEN) from error


def find_evaluations() -> Iterator[Unfinished]:
    """What interrupted evaluations have left in `evaluations_folder`: unfinished work, and models for a killed command.

    Raises StoreError.
    """
    try:
        folder = evaluations_folder()
    except StoreError:  # without a home, they had to name a folder
        return
    if not folder.is_dir():
        return
    yield from find_unfinished(str(folder))
    for path in sorted(folder.glob(f"{PREFIX}*")):
        if (path / MANIFEST_NAME).is_file():
            why = "a model for the command of an evaluation: remove it yourself, if none is running"
            nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield Unfinished(path, path, 0, nbytes, path.stat().st_mtime, why, partial(remove_checkpoint, path))


@contextmanager
def work_folder(settings: EvaluateSettings, name: str) -> Iterator[Path]:
    """The folder of this name for unfinished work. A StoreError of the block says how to choose another place for it."""
    try:
        yield (Path(settings.work) if settings.work else evaluations_folder()) / f"{PREFIX}{name}"
    except StoreError as error:
        own = "choose another folder for unfinished work" + ("" if settings.work else f" with {named('work')}")
        fix = error.finding.fix
        for text in _OUTPUT:
            fix = fix.replace(text, own).replace(text.capitalize(), own.capitalize())
        error.finding = replace(error.finding, fix=fix)
        raise
