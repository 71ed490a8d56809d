"""Optional dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from weightsmith._base.errors import Unsupported, WeightsmithError
from weightsmith._base.installation import install


def missing(names: Sequence[str], whose: str, extra: str, instead: str = "") -> list[WeightsmithError]:
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
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
