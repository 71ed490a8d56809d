"""Stored formats of an installed package, for tests."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weightsmith import stored


@contextmanager
def installed(folder: Path, points: str, **modules: str | types.ModuleType) -> Iterator[None]:
    """A package `brought 1.0` with these entry points of stored formats, and modules: texts, which become files, or modules.

    points  lines `name = module:attribute`
    """
    info = folder / "brought-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{stored.GROUP}]\n{points}\n")
    caches: list[Callable[[], None]] = [stored.formats.cache_clear, stored._installed.cache_clear]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name, module in modules.items():
            patch.delitem(sys.modules, name, raising=False)
            if isinstance(module, str):
                (folder / f"{name}.py").write_text(module)
            else:
                patch.setitem(sys.modules, name, module)
        for clear in caches:
            clear()
        yield
        for name in modules:
            sys.modules.pop(name, None)
    for clear in caches:
        clear()
