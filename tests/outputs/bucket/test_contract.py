"""A bucket is a place of outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bucket_help import MemoryBucket
from weightsmith._outputs.bucket import parts
from weightsmith._outputs.bucket.place import bucket_place
from weightsmith.testing import OutputCase, OutputTests


class TestBucket(OutputTests):
    @pytest.fixture
    def case(self, memory: MemoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputCase:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(parts, "PART_BYTES", 200)
        return OutputCase(
            lambda: bucket_place("s3://bkt/models/out"),
            lambda: memory.contents("models/out"),
            lambda name, data: memory.put(f"models/out/{name}", data),
        )
