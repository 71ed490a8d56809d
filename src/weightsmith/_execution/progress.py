"""Progress of the work: a bar on a terminal or in a notebook, a line every ten seconds in a log, or nothing.

How long earlier runs on this machine took says about how long a plan will take. There is one line for each run in
`~/.cache/weightsmith/runs.jsonl`, or the file that `WEIGHTSMITH_RUNS` names; none if that is empty. A line has bytes, seconds,
and what makes runs similar, and no names of models or folders. A file that is missing, damaged or cannot be written costs
nothing but the estimate.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from html import escape
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from weightsmith._base.errors import WeightsmithError, printable
from weightsmith._base.files import open_regular, write_whole
from weightsmith._base.idioms import Closing
from weightsmith._base.installation import cache_home
from weightsmith._base.strict_json import parse_json
from weightsmith._base.text import count, duration, end_status, is_terminal, note, size
from weightsmith._engine.resources import processors
from weightsmith._execution.options import RunOptions
from weightsmith._plans import Plan
from weightsmith._plans.codec import has_type

if TYPE_CHECKING:
    from rich.progress import TaskID

    from weightsmith._engine.local import Progress
    from weightsmith._execution.run import Callbacks
    from weightsmith._plans.summary import TimeEstimate


LINE_SECONDS = 10.0
"""Interval of lines in a log."""

WINDOW_SECONDS = 10.0
"""Window of the speed: long enough to be steady, short enough to show a disk that stalls."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A measurement of the progress.

    label        verb of the work: `merging`
    done, total  finished and total work: bytes of the result, or other units if moved_bytes is None
    moved_bytes  bytes read and written so far, in all passes; the speed follows from them
    detail       further text
    """

    label: str
    done: int
    total: int
    moved_bytes: int | None
    detail: str = ""

    @property
    def share(self) -> float:
        """0 … 1; no work at all counts as done."""
        return self.done / self.total if self.total else 1.0


class Rates:
    """Speed and time left of each piece of work: merging and computing take turns.

    >>> clock = iter([0.0, 1.0, 2.0])
    >>> rates = Rates(lambda: next(clock))
    >>> _ = rates.take(Reading("merging", 500, 1000, 0))
    >>> rates.take(Reading("merging", 600, 1000, 400))
    (400.0, 4.0)
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: dict[tuple[str, int], tuple[float, int]] = {}
        self._windows: dict[tuple[str, int], deque[tuple[float, Reading]]] = {}

    def begins(self, reading: Reading) -> bool:
        """Whether this is the first reading of its work. Another run may do work of the same label and size."""
        window = self._windows.get((reading.label, reading.total))
        return window is None or reading.done < window[-1][1].done

    def take(self, reading: Reading) -> tuple[float | None, float | None]:
        """Bytes moved per second, and seconds left; None while unknown. Work of an earlier run is not counted.

        Less than a thousandth of the work says nothing about the time left: kernels were being compiled, or a disk woke up.
        """
        key, now = (reading.label, reading.total), self._clock()
        if self.begins(reading):
            self._began[key], self._windows[key] = (now, reading.done), deque()
        window = self._windows[key]
        window.append((now, reading))
        while len(window) > 2 and now - window[1][0] > WINDOW_SECONDS:
            window.popleft()
        then, earlier = window[0]
        speed = None
        if reading.moved_bytes is not None and earlier.moved_bytes is not None and now > then:
            speed = (reading.moved_bytes - earlier.moved_bytes) / (now - then)
        began, done = self._began[key]
        worked, remaining = reading.done - done, reading.total - reading.done
        return speed, remaining * (now - began) / worked if worked * 1000 >= max(reading.total, 1) else None


class Meter(Closing):
    """Shows readings; as a context manager it clears up at the end.

    announce  called with the plan once it is made, and with name and text of its recipe; None: nothing is called
    """

    announce: Callable[[Plan, tuple[str, str]], None] | None = None

    @abstractmethod
    def show(self, reading: Reading) -> None:
        """Show a reading, or not, if it is too soon."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Show the reason of a wait. May be called as often as `show`."""

    def close(self) -> None:  # lines stay, and a silent meter has drawn nothing
        """Leave the screen as it was. May be called twice."""


class Silent(Meter):
    """Shows nothing."""

    def show(self, reading: Reading) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""


class Lines(Meter):
    """Plain lines: one when some work begins, then one every `LINE_SECONDS`."""

    def __init__(self, write: Callable[[str], None] = note, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._rates = Rates(clock)
        self._last = 0.0
        self._said: set[str] = set()

    def show(self, reading: Reading) -> None:
        """One line every `LINE_SECONDS`."""
        now = self._clock()
        begins = self._rates.begins(reading)
        speed, seconds_left = self._rates.take(reading)
        if begins or now - self._last >= LINE_SECONDS:
            self._last = now
            self._write(printable(line(reading, speed, seconds_left)))

    def say(self, text: str) -> None:
        """One line, the first time."""
        if text not in self._said:
            self._said.add(text)
            self._write(printable(text))  # names of models are in it


def line(reading: Reading, speed: float | None, seconds_left: float | None) -> str:
    """One line of a log.

    >>> line(Reading("merging", 550_000_000, 2_200_000_000, 0, "50 of 201 tensors"), 2.1e9, 0.8)
    'merging:  25%, 550 MB of 2.20 GB, 50 of 201 tensors, 2.10 GB/s, 0.8 s left'
    """
    return f"{reading.label}: {', '.join(how_far(reading, speed, seconds_left, reading.detail))}"


def how_far(reading: Reading, speed: float | None, seconds_left: float | None, detail: str = "") -> list[str]:
    """The texts of a reading in a line or a bar; see `line`.

    >>> how_far(Reading("measuring", 1, 4, None), None, 60.0)
    [' 25%', '1:00 left']
    """
    parts = [f"{int(100 * reading.share):3d}%"]
    parts += [f"{size(reading.done)} of {size(reading.total)}"] if reading.moved_bytes is not None else []
    parts += [detail] if detail else []
    parts += [f"{size(speed)}/s"] if speed is not None else []
    parts += [f"{duration(seconds_left)} left"] if seconds_left else []
    return parts


class Drawn(Meter):
    """A display that the caller's thread draws again and again, at most every `interval` seconds; it disappears at the end."""

    interval: float

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.last = 0.0
        self._rates = Rates(clock)
        self._label = ""

    def show(self, reading: Reading) -> None:
        """Draw it, unless it is too soon."""
        now = self.clock()
        if reading.label != self._label or now - self.last >= self.interval:
            self._label, self.last = reading.label, now
            self.draw(reading, *self._rates.take(reading))

    @abstractmethod
    def draw(self, reading: Reading, speed: float | None, seconds_left: float | None) -> None:
        """Draw a reading. speed, seconds_left: see `Rates.take`."""


class Bar(Drawn):
    """A bar on a terminal."""

    interval = 0.1

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(clock)
        self._task: TaskID | None = None
        columns = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("label", "facts")]
        self._bar = Progress(
            columns[0], BarColumn(bar_width=None), columns[1], console=Console(stderr=True), transient=True, auto_refresh=False
        )

    def draw(self, reading: Reading, speed: float | None, seconds_left: float | None) -> None:
        self._update(reading.label, "  ".join(how_far(reading, speed, seconds_left)), reading.share)

    def say(self, text: str) -> None:
        """The text in place of the label; the bar stays as it was."""
        now = self.clock()
        if now - self.last >= self.interval:
            self.last = now
            self._update(text, "", None)

    def _update(self, label: str, right: str, share: float | None) -> None:
        label = printable(label)
        if self._task is None:
            end_status()
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0, label="", facts="")
        self._bar.update(self._task, completed=share, label=label, facts=right, refresh=True)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


class Cell(Drawn):
    """A line with a bar under a notebook's cell."""

    interval = 0.5

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        notebook: Any = import_module("IPython.display")  # no dependency: a notebook's kernel has it
        self._html = notebook.HTML
        self._handle: Any = notebook.display(notebook.HTML(""), display_id=True)

    def draw(self, reading: Reading, speed: float | None, seconds_left: float | None) -> None:
        text = line(reading, speed, seconds_left)
        self._handle.update(self._html(f"<progress value='{reading.share:.3f}' max='1'></progress> {escape(text)}"))

    def say(self, text: str) -> None:
        """The text alone."""
        self._handle.update(self._html(escape(text)))

    def close(self) -> None:
        """Take the line away."""
        self._handle.update(self._html(""))


def in_notebook() -> bool:
    """A Jupyter kernel runs this."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def watched_meter() -> Meter:
    """The meter of a Python call: a bar in notebooks and on terminals, silent elsewhere."""
    if in_notebook():
        return Cell()
    return Bar() if is_terminal(sys.stderr) else Silent()


def shown_meter(progress: bool | Meter) -> AbstractContextManager[Meter]:
    """The meter of a Python call: the caller's, which stays open; True: `watched_meter`; False: none."""
    if isinstance(progress, Meter):
        return nullcontext(progress)
    return watched_meter() if progress else Silent()


def callbacks(shown: Meter, doing: str) -> Callbacks:
    """Callbacks of a run that a meter shows. doing: the verb of the work."""
    from weightsmith._execution.run import Callbacks

    return Callbacks(
        lambda progress: show_progress(shown, progress, doing),
        lambda done, total: shown.show(Reading("checking finished tensors", done, total, done)),
        lambda: shown.say("waiting for another process, which computes what this part needs"),
        lambda done, total: shown.show(Reading("uploading", done, total, done)),
    )


def show_progress(shown: Meter, progress: Progress, doing: str) -> None:
    """One line of the meter. doing: the verb of the work."""
    computation = progress.computation
    if progress.compiling:
        from weightsmith._kernels.compiler import cache_folder

        kept = "first use only" if cache_folder() else "at every use: there is no folder to keep them in, set NUMBA_CACHE_DIR"
        shown.say(f"compiling kernels ({kept})")
        return
    if progress.checking:
        shown.say("checking that transformers can load the output")
        return
    if progress.waiting and computation is not None:
        if computation.total:
            shown.show(Reading(computation.doing, computation.done, computation.total, None))
        else:
            shown.say(f"{computation.doing}: {'loading torch' if _loading_torch() else 'starting'}")
        return
    if not progress.total_tensors:  # a plan of products alone, between two of them
        return
    done, total = progress.written_bytes, progress.total_bytes
    label = doing if progress.tensors < progress.total_tensors else "saving to disk"
    detail = f"{progress.tensors:,} of {count(progress.total_tensors, 'tensor')}"
    if progress.copied_bytes:
        detail += f", {size(progress.copied_bytes)} from local copies"
    shown.show(Reading(label, done, total, progress.read_bytes + done, detail))


def _loading_torch() -> bool:
    """A thread is importing it now."""
    return bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def meter(*, quiet: bool) -> Meter:
    """The meter for this stderr."""
    if quiet:
        return Silent()
    return Bar() if is_terminal(sys.stderr) else Lines()


CHOSEN = "WEIGHTSMITH_RUNS"
"""Variable that names the file; empty for none."""
MIN_SECONDS = 5.0
"""A shorter run is mostly imports, and says nothing about the speed."""
MAX_RUNS = 500
"""Lines of the file; older ones make room."""
MAX_BYTES = 1 << 20
_COMPARED = 5
"""The latest similar runs count."""
_MOST_LARGER = 10
"""A run is not estimated from one with less than a tenth of its bytes: imports and compilation took most of that one's time."""


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run that began from nothing and was published.

    nbytes  read, as stored, and written
    """

    method: str
    format: str
    device: str
    threads: int
    streamed: bool
    nbytes: int
    seconds: float

    def is_like(self, other: PastRun) -> bool:
        """Whether its speed is likely that of the other."""
        return replace(self, nbytes=0, seconds=0.0) == replace(other, nbytes=0, seconds=0.0)


def past_run(plan: Plan, options: RunOptions, nbytes: int, seconds: float = 0.0) -> PastRun:
    """A run of a plan, as the file has it."""
    threads = options.threads or processors()
    return PastRun(plan.provenance.name, plan.provenance.format, options.device, threads, options.stream, nbytes, seconds)


def remember(run: PastRun) -> None:
    """Add a run to the file. Short ones are not added."""
    if run.seconds < MIN_SECONDS or run.nbytes <= 0:
        return
    with suppress(OSError, RuntimeError):
        path, runs = _file(), [*_runs()]
        if not runs and path.exists() and not (path.is_file() and path.stat().st_size == 0):
            return  # it holds something else, which is not ours to replace
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(asdict(one)) for one in (*runs, run)]
        write_whole(path, "".join(f"{line}\n" for line in lines[-MAX_RUNS:]).encode())


def similar_time(plan: Plan, options: RunOptions, nbytes: int) -> TimeEstimate | None:
    """Estimate the time of a run from the speed of similar runs that were not much smaller; None without any.

    nbytes  read and written
    """
    asked = past_run(plan, options, nbytes)
    runs = (run for run in _runs() if run.is_like(asked) and run.nbytes * _MOST_LARGER >= nbytes)
    speeds = [run.seconds / run.nbytes for run in runs][-_COMPARED:]
    if not speeds:
        return None
    from weightsmith._plans.summary import TimeEstimate

    return TimeEstimate(round(median(speeds) * nbytes, 1), len(speeds))


def _file() -> Path:
    """Raises RuntimeError without a home, and FileNotFoundError if there is to be none."""
    chosen = os.environ.get(CHOSEN)
    if chosen == "":
        raise FileNotFoundError
    return Path(chosen) if chosen else cache_home() / "runs.jsonl"


def _runs() -> Iterator[PastRun]:
    """The runs of the file, without lines that are damaged."""
    try:
        with open_regular(_file()) as file:
            lines = file.read(MAX_BYTES).splitlines()
    except (OSError, RuntimeError, WeightsmithError):
        return
    for line in lines:
        with suppress(ValueError):
            values = parse_json(line)
            if has_type(values, PastRun) and 0 < values["seconds"] < math.inf and values["nbytes"] > 0:
                yield PastRun(**values)
