"""A local folder is a place of outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.output_help import tree
from weightsmith._outputs.local import LocalTarget
from weightsmith.testing import OutputCase, OutputTests


class TestLocalTarget(OutputTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> OutputCase:
        out = tmp_path / "out"

        def put(name: str, data: bytes) -> None:
            out.mkdir(exist_ok=True)
            (out / name).write_bytes(data)

        return OutputCase(lambda: LocalTarget(str(out)), lambda: tree(out), put)
