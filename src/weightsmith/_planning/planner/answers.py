"""What transformers said before: the same question of the same versions is not asked again.

One small file for each answer, in `~/.cache/weightsmith/loading`. A file that is missing, damaged or cannot be written costs
nothing but the time to ask.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from weightsmith._base.installation import cache_home

_OURS = re.compile(r"[0-9a-f]{1,64}\.(json|\d+)")
MAX_FILES = 200
MAX_BYTES = 1 << 20
"""Of an answer: a longer one is not kept."""

Sound = Callable[[dict[str, Any]], bool]


def folder() -> Path:
    """Where answers are kept. Raises RuntimeError without a home."""
    return cache_home() / "loading"


def key_of(question: str, script: Path, packages: tuple[str, ...]) -> str:
    """The name of a question's file; "" if its answer is not to be kept.

    packages  that answer; a version under development is no version: what it says may change
    """
    try:
        versions = [metadata.version(name) for name in packages]
        if any(not version or "dev" in version for version in versions):  # none: its metadata is damaged
            return ""
        parts = [script.read_text(), sys.version, sys.prefix, *versions, question]
    except (OSError, ValueError, metadata.PackageNotFoundError):
        return ""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def differences(answer: dict[str, Any]) -> bool:
    """Whether an answer is a list of differences."""
    listed = answer.get("differences") if set(answer) == {"differences"} else None
    return isinstance(listed, list) and all(isinstance(row, list) and [*map(type, row)] == [str] * 3 for row in listed)


def find(key: str, sound: Sound = differences) -> dict[str, Any] | None:
    """The answer that was kept; None if there is none.

    sound  whether it is an answer at all: files may be damaged
    """
    if not key:
        return None
    try:
        with (folder() / f"{key}.json").open("rb") as file:
            answer = json.loads(file.read(MAX_BYTES))
    except (OSError, RuntimeError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and sound(answer) else None


def keep(key: str, answer: dict[str, Any], sound: Sound = differences) -> None:
    """Keep an answer; what may change with memory or other packages, a failure, is not kept. The oldest files make room."""
    data = json.dumps(answer)
    if not key or not sound(answer) or len(data) > MAX_BYTES:
        return
    try:
        place = folder()
        place.mkdir(parents=True, exist_ok=True)
        unfinished = place / f"{key}.{os.getpid()}"
        unfinished.write_text(data)
        unfinished.replace(place / f"{key}.json")
        files = sorted((p for p in place.iterdir() if _OURS.fullmatch(p.name)), key=lambda path: path.stat().st_mtime)
        for path in files[:-MAX_FILES]:
            path.unlink()
    except (OSError, RuntimeError):
        return
