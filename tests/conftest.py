"""Settings of all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

from weightsmith.planner import loading

# The first call of a kernel compiles it, which takes seconds; a deadline would fail whichever test comes first.
settings.register_profile("weightsmith", deadline=None)
settings.load_profile("weightsmith")


@pytest.fixture(autouse=True)
def unasked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks transformers about a stack: a process for each takes seconds. Tests of that have the mark `loading`."""
    if request.node.get_closest_marker("loading") is None:
        monkeypatch.setattr(loading, "installed", lambda: False)
