"""Long parametrisations: a run of all tests takes a sample of them, `make test-sweeps` the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], sample: Collection[Any], name: Callable[[Any], str] = str) -> list[Any]:
    """Parameters; those that are not in the sample have the mark `sweep`. name: of one, for its id"""
    return [pytest.param(each, marks=() if each in sample else pytest.mark.sweep, id=name(each)) for each in values]
