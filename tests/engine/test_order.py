"""In which order steps begin where one of them waits for a product."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from weightsmith._engine.schedule import Scheduler


@pytest.mark.parametrize(("in_order", "first"), [(False, ["a", "c", "e"]), (True, ["a"])])
def test_steps_wait_for_those_before_them_only_if_they_are_to_begin_in_order(in_order: bool, first: list[str]) -> None:
    needs = {"a": "", "b": "one", "c": "", "d": "two", "e": ""}
    begun: list[str] = []

    def begin(step: Any) -> list[Any]:
        begun.append(step)
        return []  # finished at once

    steps: Any = [(step, frozenset([name] if name else [])) for step, name in needs.items()]
    scheduler = Scheduler(steps, ("one", "two"), begin, lambda flight: None, in_order=in_order)
    thread = threading.Thread(target=scheduler.next)
    thread.start()

    def settled() -> list[str]:
        while True:
            with scheduler._condition:  # under which steps are begun
                if scheduler.waiting or not thread.is_alive():
                    return [*begun]
            time.sleep(0.001)

    assert settled() == first
    scheduler.product_finished("two")
    assert settled() == (first if in_order else [*first, "d"])
    scheduler.product_finished("one")
    thread.join(60)
    assert begun == (["a", "b", "c", "d", "e"] if in_order else [*first, "d", "b"])
