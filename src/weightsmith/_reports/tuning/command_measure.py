"""A number that a command of the user's prints about a merged model, such as a benchmark's score. Smaller is better.

The candidate is written to a folder beside the recipe, the command runs, and the folder is removed. A command that leaves files
in it ends the search: they are not ours to delete.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from weightsmith._base.errors import NonFinite, WeightsmithError
from weightsmith._base.options import RunOptions, TuneSettings, option_error
from weightsmith._execution.execute import execute
from weightsmith._execution.progress import Meter
from weightsmith._outputs.local.target import remove_checkpoint
from weightsmith._planning.planner import Prepared
from weightsmith._reports.tuning.candidates import Values
from weightsmith._reports.tuning.journal import Trial
from weightsmith._reports.tuning.result import Judged

MODEL = "{model}"
"""Stands for the folder of the model in a command."""

READ_BYTES = 64 << 10
"""Bytes read from the end of a command's output."""

_SHOWN = 5
"""Lines of a failed command's output that a message shows."""


class CommandFailed(WeightsmithError):
    """A command ended with an error, or printed no number."""


class CommandMeasure:
    """Scores a model by the number that a command prints; see `Measure`."""

    objective = "command"

    def __init__(self, first: Prepared, folder: Path, settings: TuneSettings, running: RunOptions, shown: Meter) -> None:
        """
        first   the candidate at the start values
        folder  for a model while it is measured, with a number where several processes search; another program's files
                there are not replaced

        Raises ParameterError for a command without a place for the model.
        """
        self.counts = [1]
        self.identity: Mapping[str, Any] = {"command": hashlib.sha256((settings.command or "").encode()).hexdigest()}
        self._command, self._report = settings.command or "", settings.report_command
        _words("command", self._command, folder)
        if self._report is not None:
            _words("report_command", self._report, folder)
        self._first, self._beside, self._shown = first, folder, shown
        self.seat = 0
        self._running = replace(running, report=None, push=None, evaluate=None, overwrite=True, resume=False)
        self._works = False

    def score(self, number: int, values: Values, prepared: Prepared, *, slopes: bool) -> Trial:
        """Write a candidate, and run the command. A command that fails before it ever worked ends the search."""
        try:
            found = self._measured("command", self._command, prepared)
        except CommandFailed as error:
            if not self._works:
                raise
            return Trial(number, values, error=error.finding.what[:500])
        self._works = True
        return Trial(number, values, ((found,),))

    def told(self, trial: Trial) -> float:
        """The number."""
        self._works = True
        return self.losses(trial)[0]

    def losses(self, trial: Trial) -> list[float]:
        """The number."""
        [[found]] = trial.nats
        assert found is not None
        return [found]

    def written(self, loss: float) -> str:
        """The number."""
        return f"{loss:.6g}"

    def judge(self, best: Prepared) -> Judged:
        """Measure the best and the start again, with the command of the report if there is one."""
        name, command = ("command", self._command) if self._report is None else ("report_command", self._report)
        measured = {}
        for model, prepared in {"tuned": best, "start": self._first}.items():
            self._shown.say(f"judging: {model}")
            measured[model] = self._measured(name, command, prepared)
        return Judged((self._command,), () if self._report is None else (self._report,), measured=measured)

    @property
    def _folder(self) -> Path:
        return self._beside if self.seat == 0 else self._beside.with_name(f"{self._beside.name}-{self.seat + 1}")

    def _measured(self, name: str, command: str, prepared: Prepared) -> float:
        execute(prepared, self._folder, self._running)
        try:
            return run_command(name, command, self._folder)
        finally:
            remove_checkpoint(self._folder)


def run_command(name: str, command: str, model: Path) -> float:
    """Run a command, and read the number that it prints in its last line.

    name  of its option

    Raises CommandFailed if it fails or prints no number; NonFinite for a number that is NaN or infinite.
    """
    words = _words(name, command, model)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as complaint:
        try:
            status = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out, stderr=complaint, check=False).returncode
        except OSError as error:
            raise _failed(name, f"{words[0]} cannot be run: {error.strerror}", [], "check the command") from error
        lines = _end(out)
        if status:
            what = f"the command ended with status {status}: {shlex.join(words)}"
            raise _failed(name, what, _end(complaint) or lines, "run it yourself to see why")
        if not lines:
            raise _failed(name, f"the command printed nothing: {shlex.join(words)}", _end(complaint))
    try:
        found = float(lines[-1])
    except ValueError:
        raise _failed(name, f"the last line of the command is no number: {shlex.join(words)}", lines) from None
    if not math.isfinite(found):
        raise NonFinite(f"the command printed {found}", where=name)
    return found


def _failed(
    name: str, what: str, lines: Sequence[str], fix: str = "write the number into the last line; smaller is better"
) -> CommandFailed:
    return CommandFailed(what, where=name, details=lines[-_SHOWN:], fix=fix)


def _words(name: str, command: str, model: Path) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise option_error(name, f"the command cannot be read: {error}") from None
    if not any(MODEL in word for word in words):
        raise option_error(name, f"the command does not name the model: {command!r}", f"write {MODEL} in place of its folder")
    return [word.replace(MODEL, str(model)) for word in words]


def _end(file: IO[bytes]) -> list[str]:
    """The last lines of a file that are not empty."""
    size = file.seek(0, 2)
    file.seek(max(0, size - READ_BYTES))
    text = file.read().decode(errors="replace")
    return [line.strip()[:500] for line in text.splitlines() if line.strip()]
