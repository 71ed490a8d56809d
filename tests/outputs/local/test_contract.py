"""A local folder is a place of outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.output_help import tree
from weightsmith._outputs.local.place import LocalFolder
from weightsmith.testing import OutputCase, OutputTests


class TestLocalFolder(OutputTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> OutputCase:
        out = tmp_path / "out"
        return OutputCase(lambda: LocalFolder(str(out)), lambda: tree(out), lambda name, data: (out / name).write_bytes(data))
