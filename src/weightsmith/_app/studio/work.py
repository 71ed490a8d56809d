"""The state that the page shows; and one merge at a time, in a thread: started, watched, cancelled, resumed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weightsmith import Busy, Merged, find_unfinished, merge
from weightsmith.plugin import Meter, Rates, Reading

PAGE_NAME = "report.html"
"""The report in the folder of a result."""

State = Literal["idle", "running", "cancelled", "interrupted", "published", "failed", "done"]


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


@dataclass(frozen=True, slots=True)
class Status:
    """How far a merge is.

    number   of the merge, from 1 on; 0 before the first
    out      its folder; None before the first one
    doing    what is being done
    reading  the last look at the work; None if there is nothing to measure
    speed, seconds_left   bytes a second, and seconds; None while unknown
    problem  why it failed
    merged   the result

    interrupted: an earlier studio was killed while it ran; published: after it had written the result
    """

    state: State = "idle"
    number: int = 0
    out: Path | None = None
    doing: str = ""
    reading: Reading | None = None
    speed: float | None = None
    seconds_left: float | None = None
    problem: Exception | None = None
    merged: Merged | None = None


class WorkCancelled(KeyboardInterrupt):
    """Raised in the thread of a merge, so that the engine stops as after Ctrl-C: finished tensors are kept."""


class StudioWork:
    """The merge of this process. Its methods may be called from any thread."""

    def __init__(self, status: Status = Status()) -> None:
        self._lock = threading.Lock()
        self._status = status
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def status(self) -> Status:
        """How far it is, now."""
        with self._lock:
            return self._status

    def start(self, recipe: str, out: Path, *, overwrite: bool = False, resume: bool = True) -> Status:
        """Begin a merge, and return how it begins. Raises Busy.

        recipe  YAML text that was checked; for the others see `RunOptions`
        """
        with self._lock:
            if self._status.state == "running":
                raise Busy("a merge is running", where=str(self._status.out), fix="wait until it is done, or cancel it")
            self._cancel.clear()
            started = self._status = Status("running", self._status.number + 1, out, "planning")
        arguments = (recipe, out, overwrite, resume)
        self._thread = threading.Thread(target=self._run, args=arguments, name="weightsmith-studio", daemon=True)
        self._thread.start()
        return started

    def cancel(self) -> None:
        """Stop the merge at its next tile. Finished tensors are kept, and the next `start` of the same merge resumes."""
        self._cancel.set()

    def wait(self, seconds: float | None = None) -> Status:
        """Wait until nothing runs, or for so long."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.status

    def _run(self, recipe: str, out: Path, overwrite: bool, resume: bool) -> None:
        watching = _Watching(self._update, self._cancel)
        try:
            merged = merge(
                recipe,
                out,
                progress=watching,
                overwrite=overwrite,
                resume=resume,
                report=str(Path(out) / PAGE_NAME),
            )
        except KeyboardInterrupt:
            self._update(state="cancelled")
        except Exception as error:  # of a method, too
            self._update(state="failed", problem=error.with_traceback(None))
        else:
            self._update(state="done", merged=merged)

    def _update(self, **values: object) -> None:
        with self._lock:
            self._status = replace(self._status, **values)  # type: ignore[arg-type]


class _Watching(Meter):
    """Keeps what a meter would show, and stops the run when asked to."""

    def __init__(self, update: Callable[..., None], cancel: threading.Event) -> None:
        self._update = update
        self._cancel = cancel
        self._rates = Rates(time.monotonic)

    def _stop_if_asked(self) -> None:
        if self._cancel.is_set():
            raise WorkCancelled

    def show(self, reading: Reading) -> None:
        """Keep it. Called about ten times a second."""
        self._stop_if_asked()
        speed, seconds = self._rates.take(reading)
        self._update(doing=reading.label, reading=reading, speed=speed, seconds_left=seconds)

    def say(self, text: str) -> None:
        """Keep it."""
        self._stop_if_asked()
        self._update(doing=text, reading=None)

    def close(self) -> None:
        """Nothing to clear up."""


def unfinished(out: Path) -> bool:
    """Whether an interrupted merge into this folder can be resumed."""
    return out.parent.is_dir() and any(work.out == out for work in find_unfinished(str(out.parent)))
