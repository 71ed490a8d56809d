"""The studio's files on disk, next to the results: the recipe, its version, and the runs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weightsmith import Busy, StoreError
from weightsmith._app.studio.check import TEXT_FOLDER
from weightsmith.plugin import parse_json

FOLDER = ".studio"
"""In the folder of the results."""
MAX_RUNS = 500
"""Runs that are kept; the oldest go first."""
_RECIPE, _RUNS, _RUNNING, _LOCK = "recipe.json", "runs.json", "running.json", "lock"
_MAX_BYTES = 64 << 20
_TABS = 200


@dataclass(frozen=True, slots=True)
class StudioRun:
    """One entry of the list of runs.

    id       from 1 on
    kind     preview, try, sweep, tune, look or merge
    when     start time, in seconds since 1970
    title    as listed
    recipe   its text
    seconds  how long it took
    numbers  results by name, as texts
    report   whether it has a page: `KeptRuns.report`
    model    the result of a merge, as a recipe names it
    """

    id: int
    kind: str
    when: float
    title: str
    recipe: str
    seconds: float = 0.0
    numbers: Mapping[str, str] = field(default_factory=dict)
    report: bool = False
    model: str = ""


class KeptRuns:
    """The folder. The first edit creates it. Only one studio can use it at a time.

    What the disk refuses stays in memory, and is written by the next call that can: `save`, `add`, `began`, `ended`, `flush`.
    Each raises StoreError as long as something is not written. Busy if another studio has the folder: nothing is changed.

    interrupted  title by kind, of what ran when an earlier studio was killed
    """

    def __init__(self, out: Path) -> None:
        self.folder = out / FOLDER
        self.runs: list[StudioRun] = []
        self.text, self.version = "", 0
        self.taken: dict[str, int] = {}
        self.interrupted: dict[str, str] = {}
        self._running: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
        self._writing = threading.RLock()
        self._lock: int | None = None
        self._loaded = self.folder.is_dir()
        if self._loaded:
            self._open()
            self._load()

    def save(self, text: str, tab: str = "", number: int = 0) -> None:
        """Store the recipe, and the number of the tab's request: after a crash, the tab sends the request again."""
        with self._writing:
            self._check_free()
            taken = self.taken | ({tab: number} if tab else {})
            self.taken = dict(sorted(taken.items(), key=lambda pair: pair[0] == tab)[-_TABS:])
            self.version += text != self.text
            self.text = text
            self._waiting[_RECIPE] = self._recipe_json()
            self.flush()

    def add(self, run: StudioRun, report: str = "") -> None:
        """Store a run. report: its page, as HTML. A preview replaces the last run if that is a preview too."""
        with self._writing:
            self._check_free()
            if report:
                self._waiting[f"{run.id}.html"] = report
            if run.kind == "preview" and self.runs and self.runs[-1].kind == "preview":
                self._drop(self.runs.pop())
            self.runs.append(run)
            while len(self.runs) > MAX_RUNS:
                self._drop(self.runs.pop(0))
            self._waiting[_RUNS] = self._runs_json()
            self.flush()

    def began(self, kind: str, title: str) -> None:
        """Note that something runs, for the studio that follows if this one is killed."""
        self._note({**self._running, kind: title})

    def ended(self, kind: str) -> None:
        """Note that it runs no longer."""
        self._note({name: title for name, title in self._running.items() if name != kind})

    def is_newer(self, result: Path) -> bool:
        """Whether a result was published after it was noted that it began: by an earlier studio, which was killed then."""
        try:
            return result.stat().st_ctime_ns > (self.folder / _RUNNING).stat().st_mtime_ns
        except OSError:
            return False

    def _note(self, running: dict[str, str]) -> None:
        with self._writing:
            if running != self._running:
                self._running = running
                self._waiting[_RUNNING] = json.dumps(running)
            self.flush()

    def flush(self) -> None:
        """Write what is not on the disk: what it refused, and everything if the folder was removed."""
        with self._writing:
            if self._lock is not None and not self._is_locked(self._lock):  # the folder was removed, or replaced
                self.close()
                self._waiting = {_RECIPE: self._recipe_json(), _RUNS: self._runs_json(), **self._waiting}
            if self._waiting:
                self._open()
            for name in [*self._waiting]:
                self._write(name, self._waiting[name])
                del self._waiting[name]

    def _is_locked(self, lock: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), (self.folder / _LOCK).stat())
        except OSError:
            return False

    def _recipe_json(self) -> str:
        return json.dumps({"version": self.version, "text": self.text, "taken": self.taken})

    def _runs_json(self) -> str:
        return json.dumps([asdict(run) for run in self.runs])

    def _check_free(self) -> None:
        """Raise Busy if another studio has the folder. What the disk refuses is for `flush` to say."""
        try:
            self._open()
        except Busy:
            raise
        except StoreError:
            return

    def next_id(self) -> int:
        """The id of the next run."""
        return 1 + max((run.id for run in self.runs), default=0)

    def report(self, number: int) -> str | None:
        """The report of a run as HTML; None if it has none."""
        if not any(run.id == number and run.report for run in self.runs):
            return None
        try:
            return (self.folder / f"{number}.html").read_text(encoding="utf-8")
        except OSError:
            return None

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary folder, deleted at the end of the block."""
        self._open()
        try:
            folder = tempfile.TemporaryDirectory(prefix=TEXT_FOLDER, dir=self.folder)
        except OSError as error:
            raise _refused(error, self.folder) from error
        with folder as name:
            yield Path(name)

    def close(self) -> None:
        """Unlock the folder for other studios."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _drop(self, run: StudioRun) -> None:
        self._waiting.pop(f"{run.id}.html", None)
        with suppress(OSError):  # a page that nothing names
            (self.folder / f"{run.id}.html").unlink(missing_ok=True)

    def _open(self) -> None:
        if self._lock is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.folder.is_symlink():
                raise StoreError("the studio's folder is a link", where=str(self.folder), fix="name another folder with --out")
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _refused(error, self.folder) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            fix = "use its page, or start this one with another --out"
            raise Busy("another studio writes its results here", where=str(self.folder.parent), fix=fix) from None
        self._lock = lock
        if not self._loaded and (self.folder / _RECIPE).exists():  # by a studio that began and ended after this one began
            self.close()
            fix = "start this one again: it continues from there"
            raise Busy("another studio has written its results here", where=str(self.folder.parent), fix=fix)
        self._loaded = True

    def _load(self) -> None:
        recipe = self._read(_RECIPE)
        if isinstance(recipe, dict) and isinstance(recipe.get("text"), str) and isinstance(recipe.get("version"), int):
            self.text, self.version = recipe["text"], recipe["version"]
            taken = recipe.get("taken")
            if isinstance(taken, dict) and all(isinstance(number, int) for number in taken.values()):
                self.taken = taken
        listed = self._read(_RUNS)
        running = self._read(_RUNNING)
        if isinstance(running, dict) and all(isinstance(title, str) for title in running.values()):
            self.interrupted = running
        for leftover in self.folder.glob(f"{TEXT_FOLDER}*"):  # of searches that were killed
            shutil.rmtree(leftover, ignore_errors=True)
        for run_json in listed if isinstance(listed, list) else []:
            if (run := _decoded(run_json)) is not None:
                self.runs.append(run)

    def _read(self, name: str) -> Any:
        try:
            path = self.folder / name
            return parse_json(path.read_bytes()) if path.stat().st_size <= _MAX_BYTES else None
        except (OSError, ValueError):
            return None

    def _write(self, name: str, text: str) -> None:
        """Replace a file in one step."""
        path = self.folder / name
        part = path.with_name(f"{name}.part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise _refused(error, path) from error


_FIELDS = {"id": int, "kind": str, "when": float, "title": str, "recipe": str, "seconds": float, "report": bool, "model": str}


def _decoded(value: object) -> StudioRun | None:
    """A run from JSON; None for one of another version."""
    if not isinstance(value, dict) or set(value) != {*_FIELDS, "numbers"} or not isinstance(value["numbers"], dict):
        return None
    values: dict[str, Any] = {
        name: float(value[name]) if kind is float and type(value[name]) is int else value[name]
        for name, kind in _FIELDS.items()
    }
    fits = all(type(values[name]) is kind for name, kind in _FIELDS.items())
    fits = fits and all(isinstance(text, str) for text in value["numbers"].values())
    return StudioRun(**values, numbers=value["numbers"]) if fits else None


def _refused(error: OSError, path: Path) -> StoreError:
    """The error for a disk that does not take a file. Its `what` is the reason, for the head of the page."""
    fix = "free space, or make the folder writable; or start the studio with another --out"
    what = _REASONS.get(error.errno or 0) or error.strerror or type(error).__name__
    return StoreError(what, where=str(path), fix=fix)


_REASONS = {
    errno.EACCES: "the folder is not writable",
    errno.EPERM: "the folder is not writable",
    errno.EROFS: "the disk is read-only",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your disk quota is used up",
}
