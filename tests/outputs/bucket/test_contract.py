"""A bucket is a target of outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bucket_help import MemoryBucket
from weightsmith._outputs.bucket import parse_bucket_address
from weightsmith.testing import OutputCase, OutputTests


class TestBucket(OutputTests):
    @pytest.fixture
    def case(self, memory: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputCase:
        monkeypatch.chdir(tmp_path)
        return OutputCase(
            lambda: parse_bucket_address("s3://bkt/models/out"),
            lambda: memory.contents("models/out"),
            lambda name, data: memory.put(f"models/out/{name}", data),
        )
