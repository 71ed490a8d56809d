"""The state that the page shows, as JSON values by name. Every open page is sent the values that change."""

from __future__ import annotations

import threading
from typing import Any


class Board:
    """Values with revisions. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._revision = 0
        self._values: dict[str, tuple[int, Any]] = {}

    def put(self, name: str, value: Any) -> None:
        """Set a value. An equal value changes nothing."""
        with self._lock:
            if name in self._values and self._values[name][1] == value:
                return
            self._revision += 1
            self._values[name] = (self._revision, value)

    def get(self, name: str) -> Any:
        """A value; None if there is none."""
        with self._lock:
            return self._values.get(name, (0, None))[1]

    def since(self, revision: int) -> tuple[int, dict[str, Any]]:
        """The revision now, and the values that were set after another one."""
        with self._lock:
            return self._revision, {name: value for name, (set_at, value) in self._values.items() if set_at > revision}
