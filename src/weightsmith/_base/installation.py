"""How this program was installed, and so how a package is added to it; and where it keeps what it can make again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from weightsmith._base.errors import Unsupported, WeightsmithError

PROGRAM = "weightsmith"


def install(extra: str) -> str:
    """The command that adds an extra of weightsmith: `pip install 'weightsmith[torch]'`, or that of uv or pipx.

    An installation from a clone or a wheel names it, as an index may not have the package.
    """
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


def is_release(package: Path) -> bool:
    """Whether the code in this folder came from an index. A checkout, an archive or a commit has the version of others, too."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        program = distribution(PROGRAM)
        is_this_copy = Path(str(program.locate_file(package.name))).samefile(package)
        return is_this_copy and program.read_text("direct_url.json") is None
    except (PackageNotFoundError, OSError):
        return False


def cache_home() -> Path:
    """The folder for what can be made again: compiled kernels, answers of transformers, evaluations.

    Raises RuntimeError without a home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / PROGRAM


def _command(extra: str) -> str:
    how, (source, editable) = installed_by(), installed_from()
    named = f"{source or PROGRAM}{extra}"
    if how == "pipx":
        return f"pipx install --force '{named}'"
    if how == "uv tool":
        return f"uv tool install --force '{named}'"
    if not extra:
        return f"pip install --force-reinstall '{named}'"
    return f"pip install {'-e ' if editable else ''}'{named}'"


@cache
def installed_by() -> str:
    """`pipx` or `uv tool` for a program with an environment of its own, else `pip`."""
    parts = Path(sys.prefix).parts
    pairs = {*pairwise(parts)}
    return "pipx" if ("pipx", "venvs") in pairs else "uv tool" if ("uv", "tools") in pairs else "pip"


@cache
def installed_from() -> tuple[str, bool]:
    """The folder or wheel that was installed, if it is still there, and whether it is editable; "" for an index."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        about = json.loads(distribution(PROGRAM).read_text("direct_url.json") or "{}")
        address = urlsplit(about["url"])
        path = unquote(address.path)
        if address.scheme == "file" and Path(path).exists():
            return path, bool(about.get("dir_info", {}).get("editable"))
    except (PackageNotFoundError, OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return "", False


def absent_packages(names: Sequence[str], whose: str, extra: str, instead: str = "") -> list[WeightsmithError]:
    """An error if one of the packages is not installed.

    whose    what requires them, in the plural
    extra    of weightsmith, which installs them
    instead  an alternative that does not: `; or use …`
    """
    absent = [name for name in names if find_spec(name) is None]
    if not absent:
        return []
    what = f"{whose} require {' and '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed"
    return [Unsupported(what, fix=f"run {install(extra)}{instead}")]


def package_version(name: str) -> str:
    """The version of a package; "" if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
