"""Plug-ins of an installed package, for tests."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weightsmith._base import plugins
from weightsmith._models import formats as stored


def package(folder: Path, points: str, *, group: str = "formats", **modules: str) -> None:
    """What pip installs of `brought 1.0`. points: lines `name = module:attribute`; modules: their texts by name."""
    info = folder / "brought-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[weightsmith.{group}]\n{points}\n")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


@contextmanager
def installed(folder: Path, points: str, *, group: str = "formats", **modules: str | types.ModuleType) -> Iterator[None]:
    """Such a package in this process, until the end of the block. modules: texts, or modules that exist."""
    package(folder, points, group=group, **{name: module for name, module in modules.items() if isinstance(module, str)})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name, module in modules.items():
            patch.delitem(sys.modules, name, raising=False)
            if not isinstance(module, str):
                patch.setitem(sys.modules, name, module)
        _forget()
        yield
        for name in modules:
            sys.modules.pop(name, None)
    _forget()


def _forget() -> None:
    plugins.installed.cache_clear()
    stored.formats.cache_clear()
    stored._installed.cache_clear()
