"""Long parametrisations: the first ring takes a sample of them; the second ring, or `make test-sweeps`, the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def sampled(
    values: Iterable[Any], sample: Collection[Any], name: Callable[[Any], str] = str, *, others: str = "sweep"
) -> list[Any]:
    """Parameters; those that are not in the sample have the mark `others`. name: of one, for its id"""
    mark = getattr(pytest.mark, others)
    return [pytest.param(value, marks=() if value in sample else mark, id=name(value)) for value in values]
