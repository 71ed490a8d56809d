"""Packages that some jobs need and weightsmith does not install."""

from __future__ import annotations

import importlib.util


def needs_torch() -> str:
    """What to say where torch is not installed; "" where it is."""
    try:
        found = importlib.util.find_spec("torch") is not None
    except ImportError:
        found = False
    return "" if found else "this method computes with torch, which is not installed: pip install 'weightsmith[torch]'"
