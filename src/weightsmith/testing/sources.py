"""The tests that every source must pass.

    class TestMyFormat(SourceTests):
        @pytest.fixture
        def case(self, tmp_path):
            write_my_format(tmp_path / "a.mine", {"w": w})
            write_my_format(tmp_path / "b.mine", {"other": w})
            return SourceCase(lambda: open_mine(tmp_path / "a.mine"), {"w": w}, lambda: open_mine(tmp_path / "b.mine"))

The tests overwrite and replace the files that the source reads.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import SkipTest

import numpy as np

from weightsmith._base.errors import CheckpointError, NotFound, ParameterError, WeightsmithError
from weightsmith.abc.tensors import Tensors, read


def raised(call: Callable[[], object]) -> WeightsmithError | None:
    """The error of a call; None without one."""
    try:
        call()
    except WeightsmithError as error:
        return error
    return None


_THREADS = 8


@dataclass(frozen=True, slots=True)
class SourceCase:
    """A source to test.

    open      opens a new source each time
    expected  its tensors, in model order; at least one with 2 or more elements, and no file without elements
    other     opens a source of the same kind with other names, dtypes or shapes
    """

    open: Callable[[], Tensors]
    expected: Mapping[str, np.ndarray]
    other: Callable[[], Tensors]


class SourceTests:
    """The tests. A subclass defines a fixture `case`, a `SourceCase`; pytest does not collect this class itself."""

    def test_specs_are_those_of_the_tensors_in_model_order(self, case: SourceCase) -> None:
        with closing(case.open()) as source:
            assert list(source.specs) == list(case.expected)
            for name, array in case.expected.items():
                spec = source.specs[name]
                assert (spec.name, spec.dtype.numpy, spec.shape) == (name, array.dtype, array.shape)

    def test_whole_tensors_are_read(self, case: SourceCase) -> None:
        with closing(case.open()) as source:
            for name, array in case.expected.items():
                values = read(source, name)
                assert (values.dtype, values.shape) == (array.dtype, array.shape), name
                assert values.tobytes() == array.tobytes(), name

    def test_any_range_of_bytes_is_that_range_of_the_whole(self, case: SourceCase) -> None:
        random = np.random.default_rng(0)
        with closing(case.open()) as source:
            for name, array in case.expected.items():
                whole = array.tobytes()
                cuts = random.integers(0, len(whole) + 1, (40, 2))
                for start, end in [(0, 0), (len(whole), len(whole)), *map(sorted, cuts.tolist())]:
                    assert _bytes(source, name, start, end - start) == whole[start:end], (name, start, end)

    def test_a_memoryview_is_filled_and_nothing_beside_it(self, case: SourceCase) -> None:
        with closing(case.open()) as source:
            for name, array in case.expected.items():
                around = bytearray(b"\xa5" * (array.nbytes + 2))
                source.read_into(name, 0, memoryview(around)[1:-1])
                assert bytes(around) == b"\xa5" + array.tobytes() + b"\xa5", name

    def test_many_threads_read_at_once(self, case: SourceCase) -> None:
        start = threading.Barrier(_THREADS)
        with closing(case.open()) as source, ThreadPoolExecutor(_THREADS) as pool:

            def work(k: int) -> bool:
                start.wait()
                names = list(case.expected)
                ordered = names[k % len(names) :] + names[: k % len(names)]
                return all(read(source, name).tobytes() == case.expected[name].tobytes() for name in ordered * 4)

            assert all(pool.map(work, range(_THREADS)))

    def test_an_unknown_name_is_not_found(self, case: SourceCase) -> None:
        with closing(case.open()) as source:
            name = next(iter(case.expected))
            for error in (
                raised(lambda: source.read_into(f"{name}x", 0, np.empty(0, np.uint8))),
                raised(lambda: source.location(f"{name}x")),
                raised(lambda: source.extents(f"{name}x", 0, 0)),
                raised(lambda: source.natural_dtype(f"{name}x")),
                raised(lambda: source.preferred_rows(f"{name}x")),
            ):
                assert isinstance(error, NotFound), error
                assert f"{name}x" in str(error)
                assert name in str(error).replace(f"{name}x", ""), "the error does not suggest the similar name"

    def test_a_range_outside_a_tensor_is_refused_and_nothing_is_written(self, case: SourceCase) -> None:
        with closing(case.open()) as source:
            for name, array in case.expected.items():
                n = array.nbytes
                for start, count in ((-1, 1), (-1, 0), (0, n + 1), (n, 1), (n + 1, 0), (1, n)):
                    out = np.full(count, 0xA5, np.uint8)
                    error = raised(partial(source.read_into, name, start, out))
                    assert isinstance(error, ParameterError), (name, start, count, error)
                    assert f"tensor {name!r} of {n:,} bytes" in str(error)
                    assert (out == 0xA5).all()

    def test_a_location_is_where_the_bytes_are(self, case: SourceCase) -> None:
        with closing(case.open()) as source:
            for name, array in case.expected.items():
                place = source.location(name)
                if place is not None:
                    fd, offset = place
                    assert os.pread(fd, array.nbytes, offset) == array.tobytes(), name
                    assert not os.get_inheritable(fd)
                    assert any(os.path.samestat(os.fstat(fd), path.stat()) for path in source.paths), "the file is not in paths"

    def test_files_of_this_disk_have_no_extents(self, case: SourceCase) -> None:
        with closing(case.open()) as source:
            for name, spec in source.specs.items():
                assert source.extents(name, 0, spec.nbytes) == ()

    def test_rows_that_are_read_together_and_the_dtype_that_is_written(self, case: SourceCase) -> None:
        with closing(case.open()) as source:
            for name, spec in source.specs.items():
                assert source.preferred_rows(name) >= 1
                assert source.natural_dtype(name).floating == spec.dtype.floating

    def test_identity_and_state_are_the_same_after_reading_and_reopening(self, case: SourceCase) -> None:
        with closing(case.open()) as first, closing(case.open()) as second:
            before = first.identity, first.state
            for name in first.specs:
                read(first, name)
            assert (first.identity, first.state) == (second.identity, second.state) == before
            assert all(len(text) >= 32 for text in before)
            assert first.identity != first.state or not first.paths

    def test_another_header_is_another_identity(self, case: SourceCase) -> None:
        with closing(case.open()) as source, closing(case.other()) as other:
            assert source.identity != other.identity
            assert source.state != other.state

    def test_the_state_changes_when_a_file_is_replaced_with_equal_size_and_mtime(self, case: SourceCase) -> None:
        for path in _paths(case):
            with closing(case.open()) as source:
                before = source.identity, source.state
            _replace(path)
            with closing(case.open()) as source:
                assert source.identity == before[0], path
                assert source.state != before[1], path

    def test_unchanged_files_pass_the_check_whatever_was_read(self, case: SourceCase) -> None:
        with closing(case.open()) as source:
            source.check_unchanged()
            for name in source.specs:
                read(source, name)
            source.check_unchanged()

    def test_the_check_names_a_file_that_was_overwritten_in_place(self, case: SourceCase) -> None:
        for path in _paths(case):
            for reads in (False, True):
                with closing(case.open()) as source:
                    if reads:
                        for name in source.specs:
                            read(source, name)
                    _touch_in_place(path)
                    self._changed(source, path)

    def test_the_check_names_a_file_that_was_replaced_or_removed(self, case: SourceCase) -> None:
        for path in _paths(case):
            with closing(case.open()) as source:
                _replace(path)
                self._changed(source, path)
            with closing(case.open()) as source:
                aside = path.with_name(f"{path.name}.aside")
                path.rename(aside)
                self._changed(source, path)
                aside.rename(path)

    def test_a_file_that_was_replaced_before_the_first_read_is_not_read(self, case: SourceCase) -> None:
        for path in _paths(case):
            with closing(case.open()) as source:
                _replace(path)
                errors = [raised(partial(read, source, name)) for name in source.specs]
                raised_errors = [error for error in errors if error is not None]
                assert raised_errors, "no tensor is read from this file"
                assert all(isinstance(error, CheckpointError) and str(path) in str(error) for error in raised_errors)

    def test_nothing_is_read_after_close(self, case: SourceCase) -> None:
        source = case.open()
        for name in source.specs:
            read(source, name)
        fds = [place[0] for place in map(source.location, source.specs) if place is not None]
        source.close()
        source.close()
        for fd in fds:
            try:
                os.fstat(fd)
            except OSError:
                continue
            raise AssertionError(f"file descriptor {fd} is still open")
        for name in source.specs:
            error = raised(partial(read, source, name))
            empty = source.specs[name].nbytes == 0  # nothing is read
            assert empty or isinstance(error, CheckpointError), (name, error)
            assert empty or "closed" in str(error)

    @staticmethod
    def _changed(source: Tensors, path: Path) -> None:
        error = raised(source.check_unchanged)
        assert isinstance(error, CheckpointError), error
        assert str(path) in str(error)


def _bytes(source: Tensors, name: str, start: int, count: int) -> bytes:
    out = np.full(count, 0xA5, np.uint8)
    source.read_into(name, start, out)
    return out.tobytes()


def _paths(case: SourceCase) -> tuple[Path, ...]:
    """The files of the source. Skips the test if there are none."""
    with closing(case.open()) as source:
        if not source.paths:
            raise SkipTest("the source reads no files")
        assert len(set(source.paths)) == len(source.paths)
        return source.paths


def _replace(path: Path) -> None:
    """Replace a file by a copy with the same content, size and modification time, as `cp -p` and `rsync -t` do."""
    aside = path.with_name(f"{path.name}.copy")
    shutil.copy2(path, aside)
    aside.replace(path)


def _touch_in_place(path: Path) -> None:
    """Overwrite a file with its own bytes and restore its modification time."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # file system clocks tick every few milliseconds
        time.sleep(0.002)
        with path.open("r+b") as file:
            first = file.read(1)
            file.seek(0)
            file.write(first)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
