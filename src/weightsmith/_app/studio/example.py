"""Models to try the studio with: those of `weightsmith demo`, made among the results."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from weightsmith._app.demo import TUNED, make_models
from weightsmith._app.studio import draft
from weightsmith._app.studio.places import Places, reference
from weightsmith._base.errors import OutputExists, StoreError, undoing

FOLDER = "demo"
"""In the folder of the results."""
_PART = ".demo.part"
_MODELS = ("base", *TUNED)


def make(places: Places) -> str:
    """Make the models unless they are there; a recipe of them. Raises StoreError, OutputExists for a folder of another kind."""
    folder = places.out / FOLDER
    if not os.path.lexists(folder):
        try:
            _make(folder)
        except OSError as error:
            what = f"the example cannot be written: {error.strerror or error}"
            raise StoreError(what, where=reference(folder), fix="free space, or make the folder writable") from error
    if not all((folder / name / "config.json").is_file() for name in _MODELS):
        raise OutputExists("there is another folder of this name", where=reference(folder), fix="rename it")
    base, *others = (reference(folder / name) for name in _MODELS)
    return draft.begin("combine", base, others)


def _make(folder: Path) -> None:
    """Make the models, all or none."""
    part = folder.with_name(_PART)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    with undoing(lambda: shutil.rmtree(part, ignore_errors=True)):
        make_models(part)
        (part / "recipe.yml").unlink()  # its paths are those of the folder that it was made in
        part.rename(folder)
