"""Weight files: bytes land where they should, by way of the page cache or past it."""

from __future__ import annotations

import errno
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsmith._base.errors import StoreError
from weightsmith._outputs.weight_files import PAGE_BYTES, WeightFile

FILE_BYTES = 10 * PAGE_BYTES


def aligned(data: np.ndarray, offset: int) -> memoryview:
    """A copy of `data` at an address that equals `offset` modulo a page."""
    memory = np.empty(data.size + PAGE_BYTES, np.uint8)
    first = (offset - memory.ctypes.data) % PAGE_BYTES
    view = memory[first : first + data.size]
    view[:] = data
    return memoryview(view)


def bytes_of(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), np.uint8)


@pytest.mark.long
@given(st.lists(st.integers(1, FILE_BYTES - 1), max_size=6), st.integers(0, 2**32), st.booleans())
def test_any_cut_gives_the_same_file(tmp_path_factory: Any, cuts: list[int], seed: int, align: bool) -> None:
    data = np.random.default_rng(seed).integers(0, 256, FILE_BYTES, np.uint8)
    path = tmp_path_factory.mktemp("cuts") / "w"
    file = WeightFile(path)
    file.open_direct()
    edges = [0, *sorted(set(cuts)), FILE_BYTES]
    for start, end in list(itertools.pairwise(edges))[::-1]:
        piece = data[start:end]
        file.write(aligned(piece, start) if align else memoryview(piece.copy()), start)
    file.close()
    assert np.array_equal(bytes_of(path), data)


@pytest.mark.slow
def test_neighbours_that_share_a_page_are_written_by_many_threads(tmp_path: Path) -> None:
    step = 3 * PAGE_BYTES + 1234
    data = np.random.default_rng(0).integers(0, 256, 400 * step, np.uint8)
    file = WeightFile(tmp_path / "w")
    file.open_direct()
    with ThreadPoolExecutor(8) as pool:
        starts = range(0, data.size, step)
        list(pool.map(lambda start: file.write(aligned(data[start : start + step], start), start), starts))
    os.fsync(file.fd)
    file.close()
    assert np.array_equal(bytes_of(tmp_path / "w"), data)


class Calls:
    """os.pwrite that counts bytes by whether they went past the page cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: bool = False) -> None:
        self.direct = self.cached = 0
        self._pwrite, self._fail = os.pwrite, fail
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, fd: int, data: Any, offset: int) -> int:
        import fcntl

        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if direct and self._fail:
            raise OSError(errno.EINVAL, "no")
        done = self._pwrite(fd, data, offset)
        if direct:
            self.direct += done
        else:
            self.cached += done
        return done


def test_whole_pages_go_past_the_page_cache_and_the_edges_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = WeightFile(tmp_path / "w")
    file.open_direct()
    if file._direct < 0:
        pytest.skip("this file system has no O_DIRECT")
    data = np.arange(3 * PAGE_BYTES, dtype=np.uint8)
    calls = Calls(monkeypatch)
    file.write(aligned(data, 100), 100)
    assert (calls.direct, calls.cached) == (2 * PAGE_BYTES, PAGE_BYTES)
    file.write(memoryview(data.tobytes()), 100)  # read-only memory, of any address
    assert calls.direct == 2 * PAGE_BYTES
    file.close()


def test_a_write_that_is_refused_goes_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = WeightFile(tmp_path / "w")
    file.open_direct()
    data = np.random.default_rng(0).integers(0, 256, 5 * PAGE_BYTES, np.uint8)
    calls = Calls(monkeypatch, fail=True)
    file.write(aligned(data, 7), 7)
    file.close()
    assert calls.direct == 0
    assert np.array_equal(bytes_of(tmp_path / "w")[7:], data)


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    file = WeightFile(tmp_path / "w")
    file.open_direct()
    data = np.random.default_rng(0).integers(0, 256, 2 * PAGE_BYTES, np.uint8)
    file.write(aligned(data, 0), 0)
    file.close()
    assert np.array_equal(bytes_of(tmp_path / "w"), data)


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "w").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic"):
        WeightFile(tmp_path / "w")
    assert not (tmp_path / "elsewhere").exists()
