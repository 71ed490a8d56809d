"""Programs that read what weightsmith writes, where `make test` has installed them (scripts/readers.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def installed(variable: str, *parts: str) -> Path:
    """The path that an environment variable names, or else a path in the environment's folder of readers. It may not exist."""
    named = os.environ.get(variable)
    return Path(named) if named else Path(sys.prefix, "readers", *parts)
