"""What the shared suite (`tests/methods/test_methods.py`) runs every method on: `CASES` of every file here."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from tests.cases.case import Case

CASES: dict[str, Case] = {}
for _module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "case"):
    for _case in import_module(f"{__name__}.{_module}").CASES:
        assert _case.name not in CASES, f"two cases are called {_case.name}"
        CASES[_case.name] = _case
