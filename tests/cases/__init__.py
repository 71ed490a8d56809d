"""What the shared suite (`tests/methods/test_methods.py`) runs every method on: `CASES` of every file here."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Iterable
from importlib import import_module
from typing import Any

import pytest

from tests.cases.case import Case
from weightsmith._methods import get

CASES: dict[str, Case] = {}
for _module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "case"):
    for _case in import_module(f"{__name__}.{_module}").CASES:
        assert _case.name not in CASES, f"two cases are called {_case.name}"
        CASES[_case.name] = _case

MERGED = {name: case for name, case in CASES.items() if not get(case.method).requires({})}
"""Those that a recipe without a text can have."""
FIRST = {case.method: name for name, case in reversed(CASES.items())}
"""The first case of each method."""
SWEEP = (pytest.mark.sweep, pytest.mark.slow)


def swept(names: Iterable[str], sample: Collection[str] = FIRST.values()) -> list[Any]:
    """Parameters of a test: the cases of a sample in every run, the others in sweeps alone."""
    return [pytest.param(name, marks=() if name in sample else SWEEP) for name in names]
