"""Public names that are imported when they are first used: a package lists them in its `__init__.pyi`."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def public_names(package: str, init: str, namespace: dict[str, Any]) -> tuple[list[str], Callable[[str], Any]]:
    """The names that `__init__.pyi` beside `init` lists, sorted, and the package's `__getattr__` for them.

    package    its name, for errors
    init       its `__file__`
    namespace  its `globals()`: a name that was used once is found there
    """
    listed = Path(init).with_suffix(".pyi").read_text("utf-8")
    homes = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", listed, re.MULTILINE)}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        namespace[name] = value = getattr(import_module(homes[name]), name)
        return value

    return sorted(homes), find
