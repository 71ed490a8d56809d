"""Errors of calls, for tests."""

from __future__ import annotations

from collections.abc import Callable

from weightsmith._base.errors import WeightsmithError


def raised(call: Callable[[], object]) -> WeightsmithError | None:
    """The error of a call; None without one."""
    try:
        call()
    except WeightsmithError as error:
        return error
    return None
