"""A model on the Hub is a place of outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_hub import FakeHub
from weightsmith._outputs.hub import hub_target
from weightsmith.testing import OutputCase, OutputTests


class TestHub(OutputTests):
    @pytest.fixture
    def case(self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputCase:
        monkeypatch.chdir(tmp_path)
        return OutputCase(
            lambda: hub_target("hf://org/out"),
            lambda: hub.pushed.get("org/out", {}),
            lambda name, data: hub.put("org/out", {name: data}),
        )
