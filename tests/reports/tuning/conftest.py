"""Fixtures of tuning."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reports.tuning import help


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `help.make`."""
    return help.make(tmp_path_factory.mktemp("models"))


@pytest.fixture
def work(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with all of it."""
    for path in pristine.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
