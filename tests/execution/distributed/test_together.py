"""Workers measure model-wide products together: each some of the tensors, and the bytes are those of one process."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import weightsmith
from tests.execution.distributed.test_driver import MODEL_WIDE, SHARD, TIES, here, merge
from tests.execution.distributed.threads import Died, Threads
from tests.execution.test_run import files
from weightsmith._base.errors import StoreError
from weightsmith._engine.products.thresholds import Thresholds
from weightsmith._execution import together
from weightsmith._execution.together import _Measuring, units_of
from weightsmith._outputs.area import staging_folder
from weightsmith._outputs.shared import SharedResults
from weightsmith._outputs.staging import Staging

__all__ = ["here"]

RAM = TIES | {"merge_method": "ramplus", "parameters": {}, "models": [{"model": "./b"}, {"model": "./c"}]}


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "UNIT_ELEMENTS", 1 << 17)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Thread, pass and unit of each measurement."""
    noted: list[tuple[str, int, int]] = []
    plain = _Measuring._measure

    def measure(self: _Measuring, number: int, unit: int) -> Any:
        noted.append((threading.current_thread().name, number, unit))
        return plain(self, number, unit)

    monkeypatch.setattr(_Measuring, "_measure", measure)
    return noted


def units(recipe: Any) -> int:
    plan = weightsmith.plan(recipe, max_shard_bytes=SHARD)
    return len(units_of(plan, plan.products[0]))


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "passes"), [(MODEL_WIDE, 2), (RAM, 1)], ids=["thresholds", "ramplus"])
def test_each_unit_is_measured_once_and_the_bytes_are_those_of_one_process(
    here: Path, measured: list[tuple[str, int, int]], recipe: Any, passes: int
) -> None:
    weightsmith.merge(recipe, "one-process", progress=False, max_shard_bytes=SHARD)
    n, workers = units(recipe), Threads(3)
    assert n > 5
    merge(workers, recipe=recipe)
    assert sorted((number, unit) for _, number, unit in measured) == [(i, k) for i in range(passes) for k in range(n)]
    assert len({name for name, _, _ in measured}) == 3
    assert None not in [share.part for share in workers.started]
    assert files(here / "out") == files(here / "one-process")


@pytest.mark.long
def test_a_window_that_was_missed_takes_two_more_passes_of_all_workers(
    here: Path, measured: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weightsmith.merge(MODEL_WIDE, "one-process", progress=False, max_shard_bytes=SHARD)
    plain = Thresholds._end_high

    def wrong(self: Thresholds, number: int) -> None:
        plain(self, number)
        if number == 0:
            for search in self.searches.values():
                search.first, search.end = search.end, search.end + 1

    monkeypatch.setattr(Thresholds, "_end_high", wrong)
    merge(Threads(2), recipe=MODEL_WIDE)
    assert {number for _, number, _ in measured} == {0, 1, 2, 3}
    assert files(here / "out") == files(here / "one-process")


@pytest.mark.long
def test_what_a_lost_worker_has_not_measured_others_do(
    here: Path, measured: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weightsmith.merge(MODEL_WIDE, "one-process", progress=False, max_shard_bytes=SHARD)
    plain, alive = _Measuring._measure, threading.Lock()

    def measure(self: _Measuring, number: int, unit: int) -> Any:
        counts = plain(self, number, unit)
        if len(measured) >= 4 and alive.acquire(blocking=False):
            raise Died
        return counts

    monkeypatch.setattr(_Measuring, "_measure", measure)
    workers = Threads(2)
    merge(workers, recipe=MODEL_WIDE)
    n = units(MODEL_WIDE)
    assert workers.started_again() == {*workers.died}, "the part of the lost worker, and no other"
    assert len(workers.died) == 1
    assert len(measured) == 2 * n + 1, "only what the lost worker was at is measured again"
    assert files(here / "out") == files(here / "one-process")


def test_parts_that_run_one_after_the_other_measure_once(here: Path, measured: list[tuple[str, int, int]]) -> None:
    weightsmith.merge(MODEL_WIDE, "one-process", progress=False, max_shard_bytes=SHARD)
    plan = weightsmith.plan(MODEL_WIDE, max_shard_bytes=SHARD)
    for k in (2, 1):
        weightsmith.run(plan, "out", part=(k, 2), threads=1, progress=False)
    weightsmith.run(plan, "out", threads=1, progress=False)
    n = units(MODEL_WIDE)
    assert [unit for _, number, unit in measured if number == 0] == [*range(n // 2, n), *range(n // 2)]
    assert len(measured) == 2 * n
    assert files(here / "out") == files(here / "one-process")


@pytest.mark.long
def test_parts_that_run_at_once_share_and_a_killed_one_is_not_waited_for(
    here: Path, measured: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weightsmith.merge(MODEL_WIDE, "one-process", progress=False, max_shard_bytes=SHARD)
    plan = weightsmith.plan(MODEL_WIDE, max_shard_bytes=SHARD)
    parts = [
        threading.Thread(target=weightsmith.run, args=(plan, "out"), kwargs={"part": (k, 3), "threads": 1, "progress": False})
        for k in (1, 2, 3)
    ]
    for thread in parts:
        thread.start()
    for thread in parts:
        thread.join()
    weightsmith.run(plan, "out", threads=1, progress=False)
    assert len(measured) == 2 * units(MODEL_WIDE)
    assert files(here / "out") == files(here / "one-process")


@pytest.mark.parametrize("change", ["cut", "bit", "empty"])
def test_a_damaged_result_is_made_again(tmp_path: Path, change: str) -> None:
    results = SharedResults(tmp_path / "shared")
    arrays = [np.arange(5), np.zeros((0, 3), np.uint32), np.float64([[1, 2]])]
    assert results.take("0-1", lambda: arrays) is arrays
    path = tmp_path / "shared" / "0-1"
    read = results.take("0-1", lambda: [])
    assert read is not None
    assert [(a.dtype, a.shape, a.tolist()) for a in read] == [(a.dtype, a.shape, a.tolist()) for a in arrays]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes({"cut": data[:-3], "bit": data, "empty": b""}[change])
    assert results.take("0-1", lambda: [np.ones(1)]) == [np.ones(1)]


HEADERS: dict[str, list[Any]] = {
    "larger than the file": [["float32", [1 << 26]]],
    "objects": [["O", [1 << 24]]],
    "objects by name": [["object", [1 << 24]]],
    "objects that fit": [["object", [1]], ["uint8", [8]]],
    "a structure with objects": [["i4,O", [1 << 24]]],
    "larger than memory": [["uint8", [1 << 62, 1 << 62]]],
    "empty, and larger than memory": [["uint8", [0, 1 << 62]], ["uint8", [0, 1 << 70]]],
    "the last one is larger than the file": [["uint8", [16]], ["float64", [1 << 25]]],
    "less than nothing": [["uint8", [-1, -16]]],
    "no number": [["uint8", [True]]],
    "no shape": [["uint8", None]],
    "words without length": [["str", [1 << 40]]],
    "code": [["(2,", [16]]],
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_takes_no_memory_for_what_its_file_does_not_hold(tmp_path: Path, header: str) -> None:
    text = json.dumps(HEADERS[header]).encode()
    rest = len(text).to_bytes(8, "little") + text + bytes(16)
    (tmp_path / "1").write_bytes(xxhash.xxh3_128_hexdigest(rest).encode() + rest)
    tracemalloc.start()
    try:
        arrays = SharedResults(tmp_path).take("1", lambda: [np.ones(1)])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert arrays == [np.ones(1)]
    assert peak_bytes < 1 << 22


@pytest.mark.long
def test_a_sparse_file_takes_no_memory_for_the_arrays_that_it_does_not_hold(tmp_path: Path) -> None:
    """A machine that crashes may leave a file with a size and without its data."""
    nbytes = 1 << 27
    text = json.dumps([["uint8", [nbytes]]]).encode()
    with (tmp_path / "1").open("wb") as file:
        file.write(b"0" * 32 + len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + nbytes)
    tracemalloc.start()
    try:
        arrays = SharedResults(tmp_path).take("1", lambda: [np.ones(1)])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert arrays == [np.ones(1)]
    assert peak_bytes < 1 << 22


def test_a_large_result_is_read_again(tmp_path: Path) -> None:
    arrays = [np.arange(1 << 19), np.ones((3, 1 << 17), np.float32)]
    assert SharedResults(tmp_path).take("1", lambda: arrays) is arrays
    kept = SharedResults(tmp_path).take("1", lambda: [])
    assert kept is not None
    assert [array.tobytes() for array in kept] == [array.tobytes() for array in arrays]


def test_counts_that_are_longer_than_a_unit_are_not_read(here: Path) -> None:
    counts = [np.zeros(2, np.int64), np.zeros((0, 3), np.uint32)]
    fits = together._fitting(counts, 10)
    kinds = [(array.dtype, array.shape) for array in counts]
    assert fits(kinds)
    assert fits([kinds[0], (kinds[1][0], (10, 3))])
    assert not fits([kinds[0], (kinds[1][0], (11, 3))])
    assert not fits([kinds[0], (kinds[1][0], (10, 4))])
    assert together._fitting([np.zeros(65536)], 10)([(np.dtype(np.float64), (65536,))]), "as many as it has before it counts"


def test_a_result_that_another_process_makes_is_not_made(tmp_path: Path) -> None:
    results = SharedResults(tmp_path)

    def make() -> list[Any]:
        assert SharedResults(tmp_path).take("1", lambda: []) is None
        return [np.ones(2)]

    assert results.take("1", make) is not None


def interrupted_before_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure all units of a model-wide product, and end before the product is kept."""

    def fail(*_: object) -> Any:
        raise KeyboardInterrupt

    plan = weightsmith.plan(MODEL_WIDE, max_shard_bytes=SHARD)
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "keep", fail)
        with pytest.raises(KeyboardInterrupt):
            weightsmith.run(plan, "out", part=(1, 1), threads=1, progress=False)


@pytest.mark.long
def test_another_window_has_results_of_its_own(
    here: Path, measured: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run may have begun with other tiles, and so with another sample and another window."""
    weightsmith.merge(MODEL_WIDE, "one-process", progress=False, max_shard_bytes=SHARD)
    interrupted_before_it_is_kept(monkeypatch)
    shared = staging_folder(here / "out") / "products" / "shared"
    for path in shared.glob("*-0-0"):
        path.unlink()
    measured.clear()
    monkeypatch.setattr(Thresholds, "sampled", lambda self, number: False)
    plan = weightsmith.plan(MODEL_WIDE, max_shard_bytes=SHARD)
    weightsmith.run(plan, "out", threads=1, part=(1, 1), progress=False)
    n = units(MODEL_WIDE)
    assert [(number, unit) for _, number, unit in measured] == [(0, 0), *((1, k) for k in range(n))]
    weightsmith.run(plan, "out", threads=1, progress=False)
    assert files(here / "out") == files(here / "one-process")


@pytest.mark.long
def test_units_of_another_size_have_results_of_their_own(
    here: Path, measured: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout of another commit may divide a product into other units, and resumes the work all the same."""
    weightsmith.merge(MODEL_WIDE, "one-process", progress=False, max_shard_bytes=SHARD)
    interrupted_before_it_is_kept(monkeypatch)
    before = units(MODEL_WIDE)
    measured.clear()
    monkeypatch.setattr(together, "UNIT_ELEMENTS", 1 << 20)
    assert units(MODEL_WIDE) < before
    plan = weightsmith.plan(MODEL_WIDE, max_shard_bytes=SHARD)
    weightsmith.run(plan, "out", threads=1, part=(1, 1), progress=False)
    assert len(measured) == 2 * units(MODEL_WIDE)
    weightsmith.run(plan, "out", threads=1, progress=False)
    assert files(here / "out") == files(here / "one-process")


@pytest.mark.matrix("arrays0")
@pytest.mark.parametrize("arrays", [[np.zeros(3, np.int64)], [np.ones((2, 2))], [], [np.zeros(1, np.int64)] * 2])
def test_counts_of_other_dtypes_or_shapes_are_made_again(
    here: Path, measured: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, arrays: list[Any]
) -> None:
    weightsmith.merge(MODEL_WIDE, "one-process", progress=False, max_shard_bytes=SHARD)
    interrupted_before_it_is_kept(monkeypatch)
    shared = staging_folder(here / "out") / "products" / "shared"
    for path in [*shared.glob("*-0-1"), *shared.glob("*-1-2")]:
        path.unlink()
        SharedResults(shared).take(path.name, lambda: arrays)
    measured.clear()
    plan = weightsmith.plan(MODEL_WIDE, max_shard_bytes=SHARD)
    weightsmith.run(plan, "out", threads=1, part=(1, 1), progress=False)
    assert [(number, unit) for _, number, unit in measured] == [(0, 1), (1, 2)]
    weightsmith.run(plan, "out", threads=1, progress=False)
    assert files(here / "out") == files(here / "one-process")


@pytest.mark.long
def test_the_counts_of_a_unit_are_freed_before_those_of_the_next(
    here: Path, measured: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All units' counts of float32 models would be gigabytes."""
    interrupted_before_it_is_kept(monkeypatch)
    alive, most, plain = weakref.WeakSet[Any](), list[int](), SharedResults.take

    class Counts(list[Any]):
        """Arrays that can be counted."""

    def take(self: SharedResults, *arguments: Any) -> Any:
        arrays = plain(self, *arguments)
        assert arrays is not None
        most.append(len(alive))
        counts = Counts(arrays)
        alive.add(counts)
        return counts

    monkeypatch.setattr(Counts, "__hash__", object.__hash__)
    monkeypatch.setattr(SharedResults, "take", take)
    measured.clear()
    plan = weightsmith.plan(MODEL_WIDE, max_shard_bytes=SHARD)
    weightsmith.run(plan, "out", part=(1, 1), threads=1, progress=False)
    assert not measured
    assert len(most) == 2 * units(MODEL_WIDE)
    assert max(most) <= 1


@pytest.mark.long
@pytest.mark.parametrize("what", ["link", "file"])
def test_a_folder_of_results_that_is_something_else_is_one_error(here: Path, what: str) -> None:
    plan = weightsmith.plan(MODEL_WIDE, max_shard_bytes=SHARD)
    products = staging_folder(here / "out") / "products"
    weightsmith.run(plan, "out", part=(1, 2), threads=1, progress=False)
    shutil.rmtree(products)
    products.mkdir()
    (here / "elsewhere").mkdir()
    if what == "link":
        (products / "shared").symlink_to(here / "elsewhere")
    else:
        (products / "shared").write_text("mine")
    with pytest.raises(StoreError, match=f"a {what.replace('link', 'symbolic link')}, not a folder") as caught:
        weightsmith.run(plan, "out", part=(2, 2), threads=1, progress=False)
    assert "shared" in caught.value.finding.where
    assert not list((here / "elsewhere").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
@pytest.mark.parametrize("name", ["lock-products", "lock-2-of-2"])
def test_a_lock_that_is_something_else_is_one_error(here: Path, name: str, what: str) -> None:
    plan = weightsmith.plan(MODEL_WIDE, max_shard_bytes=SHARD)
    weightsmith.run(plan, "out", part=(1, 2), threads=1, progress=False)
    lock = staging_folder(here / "out") / "parts" / name
    lock.unlink(missing_ok=True)
    make: dict[str, Any] = {"link": lambda: lock.symlink_to("elsewhere"), "folder": lock.mkdir, "pipe": lambda: os.mkfifo(lock)}
    make[what]()
    with pytest.raises(StoreError, match="not a file, so it was not opened") as caught:
        weightsmith.run(plan, "out", part=(2, 2), threads=1, progress=False)
    assert caught.value.finding.where == str(lock)
    assert not (lock.parent / "elsewhere").exists()


@pytest.mark.long
def test_a_part_that_another_user_began_says_what_to_do(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = weightsmith.plan(MODEL_WIDE, max_shard_bytes=SHARD)
    weightsmith.run(plan, "out", part=(1, 2), threads=1, progress=False)

    def refuse(path: Path, flags: int = 0) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("weightsmith._outputs.locks._open", refuse)
        with pytest.raises(StoreError, match="be prepared: Permission denied") as caught:
            weightsmith.run(plan, "out", part=(2, 2), threads=1, progress=False)
    assert caught.value.finding.details == (f"path  {staging_folder(here / 'out') / 'lock'}",)
    assert "as one user; or with a umask" in caught.value.finding.fix
