"""Parts of tensors, and renamed tensors, are held to the interface of sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.mini import write_checkpoint
from tests.models.sources.test_sources import model, normal, opened
from weightsmith._models.formats.opening import open_file
from weightsmith._models.sources.composed import PartTensors, TensorPart, renamed
from weightsmith.abc.tensors import Tensors
from weightsmith.testing import SourceCase, SourceTests


def parts_of(tmp_path: Path, parts: Mapping[str, TensorPart]) -> PartTensors:
    return PartTensors(open_file(tmp_path / "x.safetensors", "x").source, parts, "x")


class TestRenamed(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        tensors = model()
        write_checkpoint(tmp_path / "all", tensors, max_shard_bytes=2000)
        names = {f"inner.{name}": name for name in tensors if name != "head"}

        def selected(chosen: Mapping[str, str]) -> Tensors:
            return renamed(opened(tmp_path / "all"), chosen, "here")

        expected = {name: tensors[stored] for name, stored in names.items()}
        others = {name: stored for name, stored in names.items() if stored != "layers.2.w"}
        return SourceCase(lambda: selected(names), expected, lambda: selected(others))


class TestRuns(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        stored = {"a": np.arange(24, dtype=np.float32).reshape(6, 4), "b": np.arange(10, dtype=np.float16)}
        save_file(stored, tmp_path / "x.safetensors")
        parts = {"one": TensorPart("a", (3, 4), ((4, 4), (16, 8))), "two": TensorPart("b", (4,), ((3, 4),))}
        expected = {"one": stored["a"][[1, 4, 5]], "two": stored["b"][3:7]}
        changed = {"one": TensorPart("a", (4,), ((0, 4),))}
        return SourceCase(lambda: parts_of(tmp_path, parts), expected, lambda: parts_of(tmp_path, changed))


class TestTransposed(SourceTests):
    @pytest.fixture
    def case(self, tmp_path: Path) -> SourceCase:
        stored = {"a": normal(5, 3), "b": normal(2, 4, 3), "c": np.arange(7, dtype=np.float16)}
        save_file(stored, tmp_path / "x.safetensors")
        parts = {
            "four": TensorPart("b", (4, 3), ((12, 12),), transposed=True),
            "one": TensorPart("a", (5, 3), transposed=True),
            "three": TensorPart("c", (7,)),
            "two": TensorPart("b", (4, 3), ((12, 12),)),
        }
        expected = {
            "four": np.ascontiguousarray(stored["b"][1].T),
            "one": np.ascontiguousarray(stored["a"].T),
            "three": stored["c"],
            "two": stored["b"][1],
        }
        changed = {"one": TensorPart("a", (5, 3))}
        return SourceCase(lambda: parts_of(tmp_path, parts), expected, lambda: parts_of(tmp_path, changed))
