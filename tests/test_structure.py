"""The packages import each other in the order of the table in docs/architecture.md, for types too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "weightsmith"
PACKAGES = re.findall(r"^\| `(\w+)` \| ", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
"""From the one that imports none of the others on."""


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    """The lines of a module that import one of ours, with the first name below `weightsmith`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import"
            names = [
                f"{node.module}.{alias.name}" if node.module == "weightsmith" else f"{node.module}" for alias in node.names
            ]
        else:
            continue
        yield from ((node.lineno, name.split(".")[1]) for name in names if name.startswith("weightsmith."))


def test_the_table_lists_the_packages_that_there_are() -> None:
    assert sorted(PACKAGES) == sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


@pytest.mark.long
def test_a_package_imports_only_packages_above_it() -> None:
    upward = []  # but for the studio, a program that stands on the public names
    for number, package in enumerate(PACKAGES):
        below = set(PACKAGES[number + 1 :])
        for file in (SOURCE / package).rglob("*.py"):
            place = file.relative_to(SOURCE)
            allowed = {"plugin"} if place.is_relative_to("_app/studio") else set()
            upward += [f"{place}:{line} imports {name}" for line, name in _imports(file) if name in below - allowed]
    assert upward == []
