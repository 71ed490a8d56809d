"""A model on the Hub is a place of outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_hub import FakeHub
from weightsmith._outputs.hub.place import parse_hub_address
from weightsmith.testing import OutputCase, OutputTests


class TestHub(OutputTests):
    @pytest.fixture
    def case(self, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputCase:
        monkeypatch.chdir(tmp_path)

        def put(name: str, data: bytes) -> None:
            import huggingface_hub

            huggingface_hub.HfApi().upload_file(path_or_fileobj=data, path_in_repo=name, repo_id="org/out")

        return OutputCase(lambda: parse_hub_address("hf://org/out"), lambda: hub.pushed.get("org/out", {}), put)
