"""What a search minimises: the interface, and the number that a command of the user's finds. Smaller is better.

For a command, the candidate is written to a folder beside the recipe, the command runs, and the folder is removed. A command
that leaves files in it ends the search: they are not ours to delete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions
from weightsmith._execution.progress import Meter
from weightsmith._outputs.local import remove_checkpoint
from weightsmith._planning.planner import Prepared
from weightsmith._reports.command import Command, CommandFailed
from weightsmith._reports.options import EvaluateSettings
from weightsmith._reports.tuning.candidates import Candidates, Values
from weightsmith._reports.tuning.journal import Trial
from weightsmith._reports.tuning.result import Judged


class Measure(Protocol):
    """Scores candidates, and judges the best.

    objective  its name
    counts     numbers that a trial has of each text
    seat       from 0: a number that no other process has that works on the search now
    identity   everything the scores depend on besides the candidate, as JSON values
    """

    objective: str
    counts: list[int]
    seat: int
    identity: Mapping[str, Any]

    def score(self, number: int, values: Values, prepared: Prepared, *, slopes: bool) -> Trial:
        """Score a candidate. slopes: also find the slope of the loss for each number.

        Raises NonFinite, MethodError, PlanError, ParameterError for a candidate that cannot be scored.
        """

    def told(self, trial: Trial) -> float:
        """The loss for the searcher, of each trial in order that has losses.

        What `score` does depends on the trials of earlier rounds alone: it is told those of a round when all are made.
        """

    def losses(self, trial: Trial) -> list[float]:
        """The loss of each text."""

    def written(self, loss: float) -> str:
        """A loss, for a line of progress."""

    def judge(self, best: Prepared) -> Judged:
        """Compare the best candidate with the start on held-out text, or with the report command."""


class CommandMeasure:
    """Scores a model by the number that a command finds; see `Measure`."""

    objective = "command"

    def __init__(
        self,
        candidates: Candidates,
        first: Prepared,
        folder: Path,
        command: str,
        report_command: str | None,
        settings: EvaluateSettings,
        running: RunOptions,
        shown: Meter,
    ) -> None:
        """
        first   the candidate at the start values
        folder  for a model while it is measured, with a number where several processes search; another program's files
                there are not replaced

        Raises ParameterError for a command without a place for the model.
        """
        self.counts = [1]
        self._command = Command.of("command", command, settings)
        self._report = None if report_command is None else Command.of("report_command", report_command, settings)
        digest = hashlib.sha256(repr(self._command.identity).encode()).hexdigest()
        self.identity: Mapping[str, Any] = {"command": digest}
        self._candidates, self._first, self._beside, self._shown = candidates, first, folder, shown
        self.seat = 0
        self._running = replace(running, report=None, push=None, evaluate=None, overwrite=True, resume=False)
        self._works = False

    def score(self, number: int, values: Values, prepared: Prepared, *, slopes: bool) -> Trial:
        """Write a candidate, and run the command. A command that fails before it ever worked ends the search."""
        try:
            number_measured = self._measured(self._command, prepared)
        except CommandFailed as error:
            if not self._works:
                raise
            return Trial(number, values, error=error.finding.what[:500])
        self._works = True
        return Trial(number, values, ((number_measured,),))

    def told(self, trial: Trial) -> float:
        """The number."""
        self._works = True
        return self.losses(trial)[0]

    def losses(self, trial: Trial) -> list[float]:
        """The number."""
        [[measured]] = trial.nats
        assert measured is not None
        return [measured]

    def written(self, loss: float) -> str:
        """The number."""
        return f"{loss:.6g}"

    def judge(self, best: Prepared) -> Judged:
        """Measure the best, the start and the mean again, with the command of the report if there is one."""
        command = self._command if self._report is None else self._report
        measured = {}
        for model, prepared in {"tuned": best, "start": self._first}.items():
            self._shown.say(f"judging: {model}")
            measured[model] = self._measured(command, prepared)
        mean = self._candidates.prepare_mean()
        if mean is not None:
            self._shown.say("judging: mean")
            with mean, suppress(CommandFailed):  # which does not lose the search
                measured["mean"] = self._measured(command, mean)
        return Judged((self._command.text,), () if self._report is None else (self._report.text,), measured=measured)

    @property
    def _folder(self) -> Path:
        return self._beside if self.seat == 0 else self._beside.with_name(f"{self._beside.name}-{self.seat + 1}")

    def _measured(self, command: Command, prepared: Prepared) -> float:
        execute(prepared, self._folder, self._running)
        try:
            return command.measured(self._folder)
        finally:
            remove_checkpoint(self._folder)
