"""A stand-in for the Hub that outputs are written to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_hub import FakeHub, serve, use
from tests.outputs.bucket.test_runs import make_llamas
from weightsmith._outputs import hub_repository


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty hub, which this process uses; it does not wait between attempts."""
    from huggingface_hub.utils import _http

    class NoWait:
        @staticmethod
        def sleep(seconds: float) -> None: ...

    warnings.filterwarnings("ignore", "Use 'content", DeprecationWarning)  # huggingface_hub sends files so
    with serve({}) as hub:
        use(hub, monkeypatch)
        monkeypatch.setattr(_http, "time", NoWait)
        monkeypatch.setattr(hub_repository, "PATIENCE", replace(hub_repository.PATIENCE, first_seconds=0.0))
        yield hub


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with three small models."""
    monkeypatch.chdir(tmp_path)
    make_llamas(tmp_path)
    return tmp_path
