"""What a run leaves: the folders of failed tests. The policy `failed` of pytest is for `tmp_path`; this is for the rest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

_made: list[tuple[Path, str]] = []  # by tmp_path_factory, and for the tests of which file
_failed: set[str] = set()  # files of tests


def pytest_configure(config: pytest.Config) -> None:
    """Note what fixtures of modules and sessions make."""
    plain = pytest.TempPathFactory.mktemp

    def mktemp(factory: pytest.TempPathFactory, basename: str, numbered: bool = True) -> Path:
        path = plain(factory, basename, numbered)
        _made.append((path, os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]))
        return path

    pytest.TempPathFactory.mktemp = mktemp  # type: ignore[method-assign]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid.partition("::")[0])


def pytest_sessionfinish() -> None:
    """Remove what was made for files of tests that passed."""
    for path, file in _made:
        if file not in _failed:
            shutil.rmtree(path, ignore_errors=True)
