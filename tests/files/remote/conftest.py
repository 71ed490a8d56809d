"""Patience that tests can afford."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsmith._files.remote import retries


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short waits; and no cache or token of whoever runs the tests."""
    from huggingface_hub import constants

    monkeypatch.setattr(retries, "PATIENCE", retries.Patience(first_seconds=0.001, most_seconds=0.01, slow_seconds=60.0))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 60)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
