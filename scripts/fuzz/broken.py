"""Kinds that are failures, to see that these are noticed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.fuzz.kind import MEGABYTES, Kind, Rng


def _broken(misbehave: Callable[[], Any]) -> Kind:
    """A kind whose mutated files make it misbehave, to see that this is noticed."""

    def use(file: str, rng: Rng) -> Iterator[Callable[[], Any]]:
        yield (lambda: None) if Path(file).read_bytes() == b"good" else misbehave

    return Kind(lambda: Path("x").write_bytes(b"good") and None, ("x",), lambda rng, data: data[::-1], use)


def _hang() -> None:
    while True:
        with contextlib.suppress(Exception):
            pass


def _long_message() -> None:
    from weightsmith._base.errors import PlanError, StoreError

    raise PlanError([StoreError("x" * 900, details=["y" * 900] * 40)])


BROKEN = {
    "traceback": _broken(lambda: {}["x"]),
    "hang": _broken(_hang),
    "memory": _broken(lambda: bytearray(b"x") * ((MEGABYTES + 100) << 20)),
    "death": _broken(lambda: os._exit(3)),
    "message": _broken(_long_message),
}
"""Not among the kinds that are run: each is a failure."""
