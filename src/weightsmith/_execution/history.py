"""How long earlier runs on this machine took, to say about how long a plan will take.

One line for each run in `~/.cache/weightsmith/runs.jsonl`, or the file that `WEIGHTSMITH_RUNS` names; none if that is empty.
A line has bytes, seconds, and what makes runs similar, and no names of models or folders. A file that is missing, damaged or
cannot be written costs nothing but the estimate.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from weightsmith._base.errors import WeightsmithError
from weightsmith._base.files import open_regular, write_whole
from weightsmith._base.installation import cache_home
from weightsmith._base.strict_json import parse_json
from weightsmith._engine.resources import processors
from weightsmith._execution.options import RunOptions
from weightsmith._plans import Plan
from weightsmith._plans.codec import has_type
from weightsmith._plans.summary import TimeEstimate

CHOSEN = "WEIGHTSMITH_RUNS"
"""Variable that names the file; empty for none."""
MIN_SECONDS = 5.0
"""A shorter run is mostly imports, and says nothing about the speed."""
MAX_RUNS = 500
"""Lines of the file; older ones make room."""
MAX_BYTES = 1 << 20
_COMPARED = 5
"""The latest similar runs count."""


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
        return _kind(self) == _kind(other)


def _kind(run: PastRun) -> tuple[str, str, str, int, bool]:
    return run.method, run.format, run.device, run.threads, run.streamed


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
    """The time of a run, by the speed of similar ones; None without any. nbytes: that it reads and writes."""
    asked = past_run(plan, options, nbytes)
    speeds = [run.seconds / run.nbytes for run in _runs() if run.is_like(asked)][-_COMPARED:]
    return TimeEstimate(round(median(speeds) * nbytes, 1), len(speeds)) if speeds else None


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
