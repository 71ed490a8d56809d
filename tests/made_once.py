"""Models that transformers makes for tests, kept in build/models: to copy a tiny one takes a tenth of the time.

A model is kept for the versions of transformers and torch, for what is asked for, and for the file that makes it. A folder
that is there is whole: it was made under another name.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

KEPT = Path(__file__).parents[1] / "build/models"


def made_once(folder: Path, source: str, asked: object, make: Callable[[Path], None]) -> None:
    """Have in `folder` what `make` makes in one. source: the file of `make`. asked: what it depends on, by its repr."""
    key = version("transformers"), version("torch"), Path(source).read_bytes(), repr(asked)
    kept = KEPT / hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    if not kept.exists():
        unfinished = KEPT / f"{kept.name}.{uuid.uuid4().hex}"
        make(unfinished)
        with suppress(OSError):  # another process was faster
            unfinished.rename(kept)
        shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
