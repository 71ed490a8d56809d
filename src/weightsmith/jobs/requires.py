"""Optional packages that some jobs require."""

from __future__ import annotations

import importlib.util


def needs_torch() -> str:
    """An error message if torch is not installed, else ""."""
    try:
        found = importlib.util.find_spec("torch") is not None
    except ImportError:
        found = False
    return "" if found else "this method requires torch, which is not installed: pip install 'weightsmith[torch]'"
