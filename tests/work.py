"""How much work something is, in place of how long it takes: a busy machine does not change it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def steps(work: Callable[[], object]) -> int:
    """The lines of Python that this thread runs. A loop inside C, such as `x in list`, counts as one.

    >>> loop = "for i in range({n}): pass"
    >>> [steps(lambda n=n: exec(loop.format(n=n))) for n in (10, 1000)]
    [12, 1002]
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
