"""What the jobs on whole matrices ask of the C library."""

from __future__ import annotations

import ctypes
from inspect import unwrap
from typing import Any

import pytest

from weightsmith.jobs import matrix


def test_large_blocks_are_asked_to_be_returned_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, parameter: int, value: int) -> int:
            calls.append((parameter, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    unwrap(matrix.return_large_blocks)()
    assert calls == [(-3, matrix.LARGE_BYTES)]


@pytest.mark.parametrize("missing", [OSError, AttributeError])
def test_nothing_is_asked_of_other_c_libraries(missing: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: Any) -> Any:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", none)
    unwrap(matrix.return_large_blocks)()
