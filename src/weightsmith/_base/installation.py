"""How this program was installed, and so how a package is added to it."""

from __future__ import annotations

import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

PROGRAM = "weightsmith"


def install(extra: str) -> str:
    """The command that adds an extra of weightsmith: `pip install 'weightsmith[torch]'`, or that of uv, pipx or a clone."""
    return _command(f"[{extra}]")


def install_package(package: str) -> str:
    """The command that adds another package beside weightsmith."""
    how = installed_by()
    if how == "pipx":
        return f"pipx inject {PROGRAM} {package}"
    if how == "uv tool":
        return f"uv tool install {PROGRAM} --with {package}"
    return f"pip install {package}"


def reinstall() -> str:
    """The command that repairs the installation."""
    return _command("")


def _command(extra: str) -> str:
    how, source = installed_by(), clone()
    if how == "pipx":
        return f"pipx install --force '{source or PROGRAM}{extra}'"
    if how == "uv tool":
        return f"uv tool install '{source or PROGRAM}{extra}'"
    if source:
        return f"pip install -e '{source}{extra}'"
    return f"pip install '{PROGRAM}{extra}'" if extra else f"pip install --upgrade {PROGRAM}"


@cache
def installed_by() -> str:
    """`pipx` or `uv tool` for a program with an environment of its own, else `pip`."""
    parts = Path(sys.prefix).parts
    pairs = {*pairwise(parts)}
    return "pipx" if ("pipx", "venvs") in pairs else "uv tool" if ("uv", "tools") in pairs else "pip"


@cache
def clone() -> str:
    """The folder that an editable installation runs from; "" for any other."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        about = json.loads(distribution(PROGRAM).read_text("direct_url.json") or "{}")
        address = urlsplit(about.get("url", ""))
        return unquote(address.path) if about.get("dir_info", {}).get("editable") and address.scheme == "file" else ""
    except (PackageNotFoundError, OSError, ValueError, AttributeError):
        return ""
