"""What a search minimises: the number that a command of the user's finds, or the losses of texts. Smaller is better.

For a command, the candidate is written to a folder beside the recipe, the command runs, and the folder is removed. A command
that leaves files in it ends the search: they are not ours to delete.

Slopes: one backward pass gives the gradients at all tensors. What a number does to the tensors is the difference of two merges,
in float32: exact where they are linear in the number, as for weights of `linear`, `task_arithmetic` and, between changes of
sign, `ties`. Numbers that change different tensors share a merge, so that weights of 30 layers take as many merges as models.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from weightsmith._activations.decoder import Arithmetic
from weightsmith._activations.decoder.forward import fast_arithmetic
from weightsmith._activations.scored_rows import ScoredRows, together
from weightsmith._base.errors import NOTHING_WRITTEN, NonFinite, ParameterError, PlanError
from weightsmith._base.torch_use import usable_device
from weightsmith._engine.results import JobMemory
from weightsmith._execution.execute import execute
from weightsmith._execution.options import RunOptions, resources_of
from weightsmith._execution.progress import Meter
from weightsmith._outputs.local import remove_checkpoint
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._planning.recipe import Scalar, Tunable
from weightsmith._reports.command import Command, CommandFailed
from weightsmith._reports.evaluate.opening import Opened, opened, prepare_readable
from weightsmith._reports.evaluate.values import RowLosses, score_of
from weightsmith._reports.options import EvaluateSettings, TuneSettings
from weightsmith._reports.tuning.candidates import Candidates, Values
from weightsmith._reports.tuning.evaluator import MEMORY_BYTES, Candidate, Evaluator, Reference, Rows
from weightsmith._reports.tuning.journal import Trial
from weightsmith._reports.tuning.result import Judged, combined
from weightsmith._reports.tuning.texts import part, read_texts, stages


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


# ---- texts


PROMOTED = 4
"""One in so many candidates, the best of the recent ones, is scored on more than the fewest rows."""

RECENT = 16
"""Candidates among which a promoted one is compared."""

MOST_MATRICES = 4
"""Kept on disk of each tensor, such as those of four methods to choose from. More would fill the disk where weights inside of
singular vectors are tuned: each candidate then has a matrix of its own."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Texts that are scored together: those with the same reference. rows: that each stage adds; None for none."""

    texts: tuple[int, ...]
    rows: tuple[Rows | None, ...]
    reference: Reference | None

    @property
    def all_rows(self) -> list[Rows]:
        """The rows of all stages, without stages that have none."""
        return [rows for rows in self.rows if rows is not None]


class TextMeasure:
    """The losses of texts; see `Measure`."""

    def __init__(
        self,
        candidates: Candidates,
        first: Prepared,
        texts: EvaluateSettings,
        settings: TuneSettings,
        running: RunOptions,
        shown: Meter,
        stack: ExitStack,
        folder: Path,
    ) -> None:
        """
        first   the candidate at the start values
        folder  where matrices that methods computed are kept for the next candidate, in a file without a name

        Raises PlanError and others for texts and references that cannot be used.
        """
        self.objective = settings.objective
        self._candidates, self._first, self._shown = candidates, first, shown
        self._streamed = running.stream
        self._one: Opened = opened(candidates.source[0] or "recipe", first)
        self._texts = read_texts(self._one, texts.text, settings.report_text, texts.rows, texts.tokens)
        self.counts = [len(rows.ids) for rows in self._texts.tune]
        self.seat = 0
        whole = [list(range(n)) for n in self.counts]
        self._stages = [whole]
        if settings.search not in ("gradient", "line"):  # others compare many candidates on few rows first
            self._stages = [list(text_stages) for text_stages in zip(*map(stages, self.counts), strict=True)]
        self._tokens = [_tokens(rows) for rows in self._texts.tune]
        memory = running.max_memory_bytes
        budget = MEMORY_BYTES if memory is None else memory // 2
        resources = resources_of(first, running)
        arithmetic = _arithmetic(settings, usable_device(resources.device))
        nonfinite = running.allow_nonfinite
        matrices = JobMemory(folder, MOST_MATRICES)
        self._evaluator = Evaluator(
            self._one, resources, budget, arithmetic=arithmetic, allow_nonfinite=nonfinite, memory=matrices
        )
        numbers = [i for i, tunable in enumerate(candidates.tunables) if not tunable.is_choice]
        self._slopes: Slopes | None = None
        if settings.search == "gradient":
            self._slopes = Slopes(stack.enter_context(candidates.in_float32()), self._evaluator, numbers)
        self._references = [self._open_reference(name, stack) for name in settings.reference]
        self.identity: Mapping[str, Any] = {
            "texts": self._texts.identity,
            "references": [model.state for prepared, _ in self._references for model in prepared.inputs],
            "scoring_dtype": arithmetic,
        }
        self._groups: list[_Group] = []
        self._few_losses: list[float] = []
        self._offsets: list[float] = []
        self._best: list[float] = []

    def _open_reference(self, name: str, stack: ExitStack) -> tuple[Prepared, Opened]:
        prepared = stack.enter_context(prepare_readable(name, streamed=self._streamed))
        text_model = opened(name, prepared)
        if not self._evaluator.fits(prepared.plan):
            fix = "compare with a model of the merge's family, size and tokenizer"
            raise ParameterError("its tensors are not those of the merge", where=name, fix=fix, state=NOTHING_WRITTEN)
        return prepared, text_model

    def written(self, loss: float) -> str:
        """A loss, for a line of progress."""
        return f"KL {loss:.4f}" if self.objective == "kl" else f"perplexity {math.exp(min(loss, 700)):.4g}"

    def told(self, trial: Trial) -> float:
        """The loss that the searcher is told: of all rows, or estimated from those of the last stage."""
        losses = [self._total(trial, numbers) for numbers in self._stages if self._scored(trial, numbers)]
        self._few_losses.append(losses[0])
        if not trial.whole:
            return losses[-1] + (self._offsets[len(losses) - 1] if self._offsets else 0.0)
        if not self._offsets:
            self._offsets = [losses[-1] - loss for loss in losses]
        if not self._best or losses[-1] < self._best[-1]:
            self._best = losses
        return losses[-1]

    def _scored(self, trial: Trial, numbers: Sequence[Sequence[int]]) -> bool:
        return all(trial.nats[i][k] is not None for i, places in enumerate(numbers) for k in places)

    def _total(self, trial: Trial, numbers: Sequence[Sequence[int]] | None = None) -> float:
        """The loss of a trial. numbers: the rows of each text that count; None: all."""
        return combined(self.losses(trial, numbers), self.objective)

    def losses(self, trial: Trial, numbers: Sequence[Sequence[int]] | None = None) -> list[float]:
        """The loss of each text, in nats for a token."""
        sums = trial.divergences if self.objective == "kl" else trial.nats
        losses = []
        for i, row_nats in enumerate(sums):
            places = range(len(row_nats)) if numbers is None else numbers[i]
            losses.append(sum(row_nats[k] or 0.0 for k in places) / float(self._tokens[i][list(places)].sum()))
        return losses

    def score(self, number: int, values: Values, prepared: Prepared, *, slopes: bool) -> Trial:
        """Score a candidate: on few rows, and on more as long as it is good enough. See `Measure`."""
        candidate = Candidate.of(prepared.plan, prepared.inputs)
        if not self._groups:
            self._groups = self._grouped()
        nats: list[list[float | None]] = [[None] * len(rows.ids) for rows in self._texts.tune]
        divergences = [list(row_nats) for row_nats in nats]

        def enter(group: _Group, rows: Rows, numbers: Mapping[int, Sequence[int]]) -> None:
            trial_now, others = self._evaluator.losses(candidate, rows, group.reference)
            at = 0
            for i, places in numbers.items():
                for k in places:
                    nats[i][k] = float(trial_now[at])
                    if others is not None:
                        divergences[i][k] = float(others[at])
                    at += 1

        def trial() -> Trial:
            row_nats = tuple(map(tuple, divergences)) if self.objective == "kl" else ()
            return Trial(number, values, tuple(map(tuple, nats)), row_nats)

        for stage in range(len(self._stages)):
            if stage and not self._goes_on(stage, trial()):
                break
            for group in self._groups:
                rows = group.rows[stage]
                if rows is not None:
                    enter(group, rows, {i: self._added(stage, i) for i in group.texts})
        trial_now = trial()
        if self._slopes is None or not slopes:
            return trial_now
        return replace(trial_now, slopes=self._slopes_at(trial_now, candidate, self._slopes))

    def _slopes_at(self, trial: Trial, candidate: Candidate, slopes: Slopes) -> tuple[float, ...]:
        """The slopes of the objective. All rows are those of one stage."""
        losses = self.losses(trial)
        counted = [losses.index(max(losses))] if self.objective == "worst" else range(len(losses))
        of_groups = []
        for group in self._groups:
            shares = [
                np.ones(len(self._tokens[i])) / self._tokens[i].sum() / len(counted) * (i in counted) for i in group.texts
            ]
            [rows] = group.all_rows
            parts = self._evaluator.gradients(candidate, rows, np.concatenate(shares), group.reference)
            of_groups.append(slopes.of(trial.values, parts))
        total = np.sum(of_groups, 0)
        if not np.isfinite(total).all():
            raise NonFinite("the gradient is NaN or infinite", where=self._one.base.label)
        return tuple(total.tolist())

    def _goes_on(self, stage: int, trial: Trial) -> bool:
        """Whether a candidate is to be scored on the rows of a stage: on those of the first it is as good as the best quarter
        of the last of earlier rounds, and then as good as the best of these."""
        loss = self._total(trial, self._stages[stage - 1])
        if not self._best:
            return True
        if stage > 1:
            return loss <= self._best[stage - 1]
        recent = sorted(self._few_losses[-RECENT:])
        return loss <= recent[max(0, len(recent) // PROMOTED - 1)]

    def _added(self, stage: int, i: int) -> list[int]:
        """The rows of text i that a stage adds."""
        before = set(self._stages[stage - 1][i]) if stage else set()
        return [k for k in self._stages[stage][i] if k not in before]

    def _grouped(self) -> list[_Group]:
        n = len(self._texts.tune)
        several = len(self._references) > 1
        groups = []
        for texts in [(i,) for i in range(n)] if several else [tuple(range(n))]:
            rows = tuple(self._rows_of(stage, texts) for stage in range(len(self._stages)))
            reference = None
            if self._references:
                prepared, _ = self._references[texts[0] if several else 0]
                read_rows = [chosen for chosen in rows if chosen is not None]
                reference = self._evaluator.reference(Candidate.of(prepared.plan, prepared.inputs), read_rows)
            groups.append(_Group(texts, rows, reference))
        return groups

    def _rows_of(self, stage: int, texts: Sequence[int]) -> Rows | None:
        added = [part(self._texts.tune[i], self._added(stage, i)) for i in texts if self._added(stage, i)]
        return Rows.of(together(added)) if added else None

    def judge(self, best: Prepared) -> Judged:
        """Score the best candidate, start, mean and base on the text of the report: in float32, as `evaluate` does."""
        self._evaluator.multiply_in("float32")
        judged_models: dict[str, Prepared] = {"tuned": best, "start": self._first}
        scores: dict[str, list[RowLosses]] = {}
        with ExitStack() as stack:
            for name, prepared in {"mean": self._candidates.prepare_mean(), "base": self._base()}.items():
                if prepared is None:
                    continue
                stack.enter_context(prepared)
                if self._evaluator.fits(prepared.plan):
                    judged_models[name] = prepared
            rows = Rows.of(together(self._texts.report))
            for name, prepared in judged_models.items():
                self._shown.say(f"judging on the text of the report: {name}")
                row_nats, _ = self._evaluator.losses(Candidate.of(prepared.plan, prepared.inputs), rows, keep=False)
                scores[name] = list(_by_text(row_nats, self._texts.report))
        judged = {name: tuple(score_of(a, None) for a in model_losses) for name, model_losses in scores.items()}
        against = {
            name: tuple(score_of(a, b) for a, b in zip(scores["tuned"], model_losses, strict=True))
            for name, model_losses in scores.items()
            if name != "tuned"
        }
        return Judged(
            texts=self._texts.names,
            report_texts=self._texts.report_names,
            judged=judged,
            against=against,
            rows=(sum(self.counts), sum(len(r.ids) for r in self._texts.report)),
            few_rows=sum(map(len, self._stages[0])),
        )

    def _base(self) -> Prepared | None:
        """The base of the recipe, if it is a model."""
        name = self._candidates.base
        try:
            return None if name is None else prepare_readable(name, streamed=self._streamed)
        except PlanError:
            return None


def _arithmetic(settings: TuneSettings, device: str) -> Arithmetic:
    """The dtype of products: float32 for slopes, and on a GPU, unless the user says otherwise."""
    if settings.scoring_dtype is not None:
        return "bfloat16" if settings.scoring_dtype == "bfloat16" else "float32"
    return "float32" if settings.search == "gradient" else fast_arithmetic(device)


def _tokens(rows: ScoredRows) -> np.ndarray:
    return (rows.nbytes >= 0).sum(1).astype(np.float64)


def _by_text(nats: np.ndarray, texts: Sequence[ScoredRows]) -> Iterator[RowLosses]:
    start = 0
    for rows in texts:
        text_nats = nats[start : start + len(rows.ids)]
        nbytes = np.where(rows.nbytes >= 0, rows.nbytes, 0).sum(1).astype(np.float64)
        yield RowLosses(text_nats, _tokens(rows), nbytes, None, None, rows.sha256)
        start += len(rows.ids)


STEP = 1 / 64
"""How far a number is moved, as a share of its range."""


class Slopes:
    """Finds the slopes of the numbers of one recipe.

    candidates  of the recipe, with float32 as the dtype of the output: a small step would be lost in the rounding to bfloat16
    numbers     places of the values that are moved
    """

    def __init__(self, candidates: Candidates, evaluator: Evaluator, numbers: Sequence[int]) -> None:
        self._candidates, self._evaluator, self._numbers = candidates, evaluator, numbers
        self._chosen: tuple[Scalar, ...] = ()
        self._touched = dict[int, frozenset[str]]()

    def of(self, values: Sequence[Scalar], gradients: Iterable[Mapping[str, Tensor]]) -> list[float]:
        """The slope of the loss for each of `numbers`, by one unit of it.

        gradients  of the loss with respect to the tensors at these values, in parts of the model
        """
        still = self._candidate(values)
        self._learn(values, still)
        groups = [(group, self._candidate(_moved(self._tunables, values, group))) for group in self._groups()]
        slopes = dict.fromkeys(self._numbers, 0.0)
        for some in gradients:
            known = [name for name in some if name in still.tensors]
            changes = [[name for name in known if moved.tensors[name] != still.tensors[name]] for _, moved in groups]
            before = self._evaluator.merged(still, [name for name in known if any(name in names for names in changes)])
            for (group, moved), names in zip(groups, changes, strict=True):
                after = self._evaluator.merged(moved, names)
                for name in names:
                    k = next(k for k in group if name in self._touched[k])
                    change = (after[name] - before[name]).astype("f8")
                    slopes[k] += float((some[name].cpu().numpy() * change).sum()) / _step(self._tunables[k], values[k])
        return [slopes[k] for k in self._numbers]

    @property
    def _tunables(self) -> Sequence[Tunable]:
        return self._candidates.tunables

    def _candidate(self, values: Sequence[Scalar]) -> Candidate:
        prepared = self._candidates.prepare(tuple(values))
        return Candidate.of(prepared.plan, prepared.inputs)

    def _learn(self, values: Sequence[Scalar], still: Candidate) -> None:
        """Find the tensors that each number changes, once for each method and set of models."""
        chosen = tuple(value for i, value in enumerate(values) if i not in self._numbers)
        if self._touched and chosen == self._chosen:
            return
        self._chosen = chosen
        for k in self._numbers:
            moved = self._candidate(_moved(self._tunables, values, [k])).tensors
            self._touched[k] = frozenset(name for name, before in still.tensors.items() if moved[name] != before)

    def _groups(self) -> list[list[int]]:
        """Group the numbers so that no two of a group change the same tensor."""
        groups: list[tuple[list[int], set[str]]] = []
        for k in self._numbers:
            touched = self._touched[k]
            for group, names in groups:
                if names.isdisjoint(touched):
                    group.append(k)
                    names |= touched
                    break
            else:
                groups.append(([k], set(touched)))
        return [group for group, _ in groups]


def _moved(tunables: Sequence[Tunable], values: Sequence[Scalar], numbers: Sequence[int]) -> list[Scalar]:
    return [float(v) + _step(tunables[i], v) if i in numbers else v for i, v in enumerate(values)]


def _step(number: Tunable, value: Scalar) -> float:
    """Inwards."""
    assert number.low is not None
    assert number.high is not None
    step = STEP * (number.high - number.low)
    return step if float(value) + step <= number.high else -step
