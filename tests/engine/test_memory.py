"""What jobs remember from one merge to the next: arrays come back as they were, and are forgotten where there is no room."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from weightsmith._engine.results import LARGE_BYTES, JobMemory

LARGE = LARGE_BYTES // 8


def test_large_arrays_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    memory = JobMemory(tmp_path)
    arrays = [np.random.default_rng(i).standard_normal((2, LARGE + i)) for i in range(3)]
    for i, array in enumerate(arrays):
        memory.of("a")[i] = array
    memory.of("b")[0] = arrays[1][::-1]
    for i, array in enumerate(arrays):
        kept = memory.of("a")[i]
        assert kept is not array
        assert (kept == array).all()
    assert (memory.of("b")[0] == arrays[1][::-1]).all()
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_each_tensor_has_a_memory_of_its_own(tmp_path: Path) -> None:
    memory = JobMemory(tmp_path)
    memory.of("a")["thresholds"] = 1.5
    assert dict(memory.of("a")) == {"thresholds": 1.5}
    assert dict(memory.of("b")) == {}


def test_without_a_folder_only_small_values_are_kept() -> None:
    memory = JobMemory().of("a")
    memory["small"], memory["large"] = np.zeros(3), np.zeros(LARGE)
    assert list(memory) == ["small"]


def test_at_most_half_of_the_free_space_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(5 * LARGE_BYTES))
    memory = JobMemory(tmp_path).of("a")
    for i in range(5):
        memory[i] = np.full(LARGE, float(i))
    assert list(memory) == [0, 1]
    assert memory[1][0] == 1.0


def test_an_array_that_is_read_once_makes_room_for_another(tmp_path: Path) -> None:
    job_memory = JobMemory(tmp_path)
    memory, other = job_memory.of("a"), job_memory.of("b")
    for key in ("once", 1), ("more", 1):
        memory[key] = np.full(LARGE, 1.0)
    assert memory["once", 1][0] == 1.0
    job_memory.read_once("once")
    assert memory["once", 1][0] == 1.0
    assert memory["more", 1][0] == memory["more", 1][0] == 1.0
    assert list(memory) == [("more", 1)]
    other["once", 2] = np.full(LARGE, 2.0)
    memory["large"] = np.full(LARGE + 1, 3.0)
    assert other["once", 2][0] == 2.0
    assert memory["more", 1][0] == 1.0
    assert memory["large"][-1] == 3.0
    assert job_memory._arrays._end == 3 * LARGE_BYTES + 8


def test_the_bytes_that_others_need_are_left_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(5 * LARGE_BYTES))
    memory = JobMemory(tmp_path, spare_bytes=4 * LARGE_BYTES).of("a")
    for i in range(5):
        memory[i] = np.full(LARGE, float(i))
    assert list(memory) == [0]


def test_the_array_that_was_not_used_for_longest_makes_room_and_the_file_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(6 * LARGE_BYTES))  # of which half is taken
    job_memory = JobMemory(tmp_path, 2)
    memory = job_memory.of("a")
    memory["small"] = 1.5
    for i in range(3):
        memory[i] = np.full(LARGE, float(i))
        assert memory.get(0, [0.0])[0] == 0.0
    assert list(memory) == ["small", 2, 0]
    for i in range(3, 9):
        memory[i] = np.full(LARGE, float(i))
    assert {key: memory[key][0] for key in (7, 8)} == {7: 7.0, 8: 8.0}
    assert list(memory) == ["small", 7, 8]
    job_memory.of("b")[0] = np.full(LARGE, 5.0)
    assert job_memory.of("b")[0][0] == 5.0, "the third place is still free"


def test_a_folder_that_is_gone_keeps_nothing(tmp_path: Path) -> None:
    memory = JobMemory(tmp_path / "gone").of("a")
    memory["large"] = np.zeros(LARGE)
    assert not memory


def test_an_array_that_the_disk_does_not_give_back_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = JobMemory(tmp_path).of("a")
    memory["large"] = np.zeros(LARGE)

    def broken(*_arguments: object) -> int:
        raise OSError("no such block")

    monkeypatch.setattr(os, "preadv", broken)
    assert memory.get("large") is None


def test_an_array_that_the_disk_takes_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:999]], offset))
    memory, array = JobMemory(tmp_path).of("a"), np.arange(float(LARGE))
    memory["large"] = array
    assert (memory["large"] == array).all()
