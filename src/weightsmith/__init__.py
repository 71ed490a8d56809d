"""Make LLM checkpoints from checkpoints, at the speed of copying files.

    import weightsmith
    weightsmith.merge("recipe.yml", "./merged")

`__init__.pyi` lists the public names. They are imported when they are first used, so that
`import weightsmith` takes milliseconds and needs no torch.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from weightsmith._version import __version__ as __version__

_LIST = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_HOMES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _LIST, re.MULTILINE)}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weightsmith' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
