"""`weightsmith.tune`: candidates are tried until the budget is spent, and the best one is judged on other text, once."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from weightsmith._activations.rows import GivenText, as_files
from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    MethodError,
    NonFinite,
    OutputExists,
    ParameterError,
    PlanError,
    StoreError,
    WeightsmithError,
)
from weightsmith._base.files import expand_user, write_whole
from weightsmith._base.options import assignment, find_option, named, option_error, read_options
from weightsmith._execution.options import RunOptions
from weightsmith._execution.progress import Meter, Reading, shown_meter
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.prepared import Prepared
from weightsmith._planning.recipe import Scalar, Source
from weightsmith._reports.command import Command, seconds_of
from weightsmith._reports.options import EvaluateSettings, TuneSettings
from weightsmith._reports.tuning.candidates import Candidates, Values
from weightsmith._reports.tuning.evolve import evolution
from weightsmith._reports.tuning.journal import Journal, Trial
from weightsmith._reports.tuning.measure import CommandMeasure, Measure, TextMeasure
from weightsmith._reports.tuning.result import Tuning, combined
from weightsmith._reports.tuning.search import searcher

if TYPE_CHECKING:
    from weightsmith._reports.keywords import TuneKeywords

WAIT_SECONDS = 0.3
"""Between two looks for trials that other processes are making."""

MARK = "# Tuned by weightsmith"

Scored = Callable[[Trial, float | None], None]
"""Takes a trial and its objective, as the report has it; None if it was not scored on all rows."""


def _unwatched(_trial: Trial, _loss: float | None) -> None:
    """Nobody is told of a trial."""


def tune(
    recipe: Source,
    out: str | os.PathLike[str],
    *,
    text: GivenText = (),
    report_text: GivenText = (),
    reference: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    progress: bool | Meter = True,
    on_trial: Scored | None = None,
    **options: Unpack[TuneKeywords],
) -> Tuning:
    """Find the values of a recipe with which the merge predicts texts best, and write the recipe with them.

    recipe       as for `merge`, with `{tune: [0, 1]}` in place of numbers and `{choice: [ties, dare_ties]}` of other values;
                 or a config of mergekit-evolve, whose tasks name texts
    out          the recipe to write, `tuned.yml`; the trials are kept beside it in `tuned.trials.jsonl`
    text         .txt, .jsonl or .parquet files to tune on, `built-in`, or strings as for `evaluate`; none: those that the
                 config names, or `command`
    report_text  the same, to judge the result on; none: the last third of the rows of each text
    reference    for `objective="kl"`: a model, or one for each text
    progress     True: a bar in terminals and notebooks, False: none; or a `Meter`
    on_trial     called with each trial when it is made, or found in the journal, and with its objective; None if it was not
                 scored on all rows
    options      see `weightsmith._base.options`: `RecipeOptions`, `EvaluateSettings`, `TuneSettings` and `RunOptions`

    No candidate is written. The same call with the same seed makes the same trials, and resumes after a crash or a
    KeyboardInterrupt, which leaves the best recipe so far. A candidate that cannot be merged is a trial without losses.

    Raises PlanError with all problems of recipe, models and texts, before tensor data is read. Raises OutputExists if this
    program did not write the output, ParameterError if no candidate has losses, and Busy or CannotResume as `merge` does.

    Memory: as for a merge, and in addition 4 GiB, or half of `max_memory_bytes`, for the candidate in float32 and the states of
    the rows. If the candidate does not fit, only one layer of it is held.

    >>> found = weightsmith.tune("ties.yml", "tuned.yml", text="fr.txt", budget=200)  # doctest: +SKIP
    >>> found.reading[0]  # doctest: +SKIP
    'The tuned recipe is 3.1 ± 0.7% better than the start on the report text: perplexity 10.12 against 10.44.'
    """
    models = [reference] if isinstance(reference, str | os.PathLike) else list(reference)
    kinds = RecipeOptions, EvaluateSettings, TuneSettings, RunOptions
    with as_files(text=text, report_text=report_text) as files:
        values = {**files.paths, "reference": [os.fspath(model) for model in models], **options}
        planning, texts, settings, running = read_options("tune", values, *kinds)
        with shown_meter(progress) as shown:
            result = tuned(recipe, os.fspath(out), planning, texts, settings, running, shown, on_trial or _unwatched)
        return replace(result, texts=files.named(result.texts), report_texts=files.named(result.report_texts))


def tuned(
    recipe: Source,
    out: str,
    planning: RecipeOptions,
    texts: EvaluateSettings,
    settings: TuneSettings,
    running: RunOptions,
    shown: Meter,
    scored: Scored = lambda _trial, _loss: None,
) -> Tuning:
    """`tune` with its options as records. scored: called with each trial when it is made, or found in the journal."""
    began = time.monotonic()
    seconds, config = seconds_of("time", settings.time), evolution(recipe)
    if config is not None:
        recipe, texts = config.recipe, replace(texts, text=texts.text or config.texts)
    Command.asked(texts)
    _check_measure(settings, texts)
    target = check_output(out)
    with ExitStack() as stack:
        candidates = stack.enter_context(Candidates(recipe, planning, streamed=running.stream))

        def measure(first: Prepared) -> Measure:
            if texts.command is not None:
                candidate_place, judge = target.with_suffix(".candidate"), settings.report_command
                return CommandMeasure(candidates, first, candidate_place, texts.command, judge, texts, running, shown)
            return TextMeasure(candidates, first, texts, settings, running, shown, stack, target.parent)

        if settings.search == "gradient" and any(candidates.whole):
            name = candidates.tunables[candidates.whole.index(True)].name
            fix = f"give it a number, or use {assignment('search', 'cma')}"
            raise option_error("search", f"{name} takes whole numbers, which have no gradient", fix)
        return _Search(candidates, measure, target, planning, settings, running, shown, stack).run(began, seconds, scored)


def _check_measure(settings: TuneSettings, texts: EvaluateSettings) -> None:
    if texts.command is not None:
        wrong = {"text": texts.text, "report_text": settings.report_text, "reference": settings.reference}
        for name in [name for name, is_set in wrong.items() if is_set]:
            raise option_error(name, f"{named(name)} and {named('command')} exclude each other", "leave one of them out")
        if settings.search == "gradient":
            fix = f"use {assignment('search', 'cma')}"
            raise option_error("search", "a number that a command prints has no gradient", fix)
        if settings.scoring_dtype is not None:
            raise option_error("scoring_dtype", "it is for texts", f"leave it out: {named('command')} measures the merge")
        if settings.objective != find_option("objective").default:
            raise option_error("objective", "it is for texts", f"leave it out: {named('command')} is the objective")
        return
    if settings.report_command is not None:
        raise option_error("report_command", f"it is for searches with {named('command')}", "name a --report-text instead")
    if not texts.text:
        fix = f"name a .txt, .jsonl or .parquet file, or a command that scores a model: {named('command')}"
        raise option_error("text", "there is no text to score", fix)
    if (settings.objective == "kl") != bool(settings.reference):
        if settings.reference:
            raise option_error("reference", "a reference is for the objective kl alone", "add --objective kl (objective='kl')")
        raise option_error("objective", "the objective kl needs a model to compare with", "add --reference MODEL (reference)")
    if settings.reference and len(settings.reference) not in (1, len(texts.text)):
        what = f"{len(settings.reference)} references for {len(texts.text)} texts"
        raise option_error("reference", what, "give one for all texts, or one for each")


# ---- the output


def check_output(out: str) -> Path:
    """The path of the recipe to write. Raises OutputExists for a file that is not from here or was changed; StoreError."""
    path = expand_user(out).absolute()
    if path.suffix not in (".yml", ".yaml"):
        fix = f"write {out}.yml"
        raise ParameterError("the output is a recipe, whose name ends in .yml", where=out, fix=fix, state=NOTHING_WRITTEN)
    if not path.parent.is_dir():
        raise StoreError(f"there is no folder {path.parent}", where=out, fix="create it", state=NOTHING_WRITTEN)
    if not os.path.lexists(path):
        return path
    if path.is_file() and not path.is_symlink():
        with path.open("rb") as file:
            head, _, rest = file.read(16 << 20).partition(b"\n")
        if head == _mark(rest).encode():
            return path
    what = "the output exists, and is not a recipe that weightsmith tune wrote, or was changed since"
    raise OutputExists(what, where=out, fix="name another file, or remove this one", state=NOTHING_WRITTEN)


def _mark(rest: bytes) -> str:
    return f"{MARK} (sha256 of the rest: {hashlib.sha256(rest).hexdigest()[:16]})."


def write_recipe(path: Path, text: str, about: str) -> None:
    """Write a recipe, whole or not at all. about: a comment for its first lines."""
    check_output(str(path))
    rest = f"# {about}\n{text.removeprefix(chr(0xFEFF))}".encode()
    try:
        write_whole(path, _mark(rest).encode() + b"\n" + rest, durable=True)
    except OSError as error:
        raise StoreError(f"the recipe cannot be written: {error.strerror}", where=str(path)) from error


# ---- the search


class _Search:
    """One search: its candidates, searcher, measure, journal."""

    def __init__(
        self,
        candidates: Candidates,
        measure: Callable[[Prepared], Measure],
        target: Path,
        planning: RecipeOptions,
        settings: TuneSettings,
        running: RunOptions,
        shown: Meter,
        stack: ExitStack,
    ) -> None:
        """measure: from the candidate at the start values."""
        self._scored: Scored = lambda _trial, _loss: None
        self._reported: set[int] = set()
        self.candidates, self.target, self.settings, self.running, self.shown = candidates, target, settings, running, shown
        self.searcher = searcher(settings.search, candidates.tunables, candidates.start, settings.budget, planning.seed)
        self.first = self.candidates.prepare(candidates.start)
        self.measure = measure(self.first)
        path, n_values = target.with_suffix(".trials.jsonl"), len(candidates.tunables)
        about = self._about(planning)
        self.journal = stack.enter_context(Journal(path, about, self.measure.counts, n_values, resume=running.resume))
        self.measure.seat = self.journal.seat
        self.best: tuple[float, Trial] | None = None
        self.done: list[Trial] = []

    def _about(self, planning: RecipeOptions) -> dict[str, Any]:
        """Description of the search: the first line of the journal."""
        states = [model.state for model in self.first.inputs]
        for i, tunable in enumerate(self.candidates.tunables):
            for choice in tunable.choices if tunable.chooses_models else ():
                start = self.candidates.start
                states += [model.state for model in self.candidates.prepare((*start[:i], choice, *start[i + 1 :])).inputs]
        return {
            "recipe": hashlib.sha256(self.candidates.text.encode()).hexdigest(),
            "models": hashlib.sha256("\n".join(states).encode()).hexdigest(),
            **self.measure.identity,
            "search": self.settings.search,
            "budget": self.settings.budget if _depends_on_budget(self.settings, self.candidates) else None,
            "objective": self.measure.objective,
            "seed": planning.seed,
            "options": repr(replace(planning, settings={})),
        }

    def run(self, began: float, seconds: float, scored: Scored) -> Tuning:
        """Try candidates, and judge the best. KeyboardInterrupt leaves the best so far. began: the call, by the clock."""
        self._scored = scored
        resumed = len(self.journal.trials)
        try:
            self._search(began + seconds)
        except KeyboardInterrupt:
            if self.best is not None:
                self._write(self.best[1], f"Interrupted after {len(self.done):,} trials; not yet judged on other text.")
            raise
        if self.best is None:
            causes = list(dict.fromkeys(trial.error for trial in self.done))
            what = f"none of {len(self.done):,} candidates could be scored"
            raise NonFinite(what, where=str(self.journal.path), details=causes[:3], fix="tune in other ranges")
        best = self.best[1]
        judged = self.measure.judge(self.candidates.prepare(best.values))
        tuning = Tuning(
            out=self.target,
            recipe=self.candidates.fill(best.values).text,
            names=tuple(tunable.name for tunable in self.candidates.tunables),
            start=self.candidates.start,
            best=best.number,
            trials=tuple(self.done),
            resumed=resumed,
            objective=self.measure.objective,
            losses={trial.number: self.measure.losses(trial) for trial in self.done if trial.whole},
            seconds=time.monotonic() - began,
            journal=self.journal.path,
            **vars(judged),
        )
        self._write(best, tuning.reading[0])
        return tuning

    def _search(self, end: float) -> None:
        """Try candidates, round by round. end: by the clock."""
        while len(self.done) < self.settings.budget:
            asked = (self.searcher.ask() or [])[: self.settings.budget - len(self.done)]
            values = {len(self.done) + i: self.candidates.rounded(place) for i, place in enumerate(asked, 1)}
            learned: list[tuple[float, Sequence[float]]] = []
            try:
                self._make(values, end)
            finally:
                for number in values:
                    if number in self.journal.trials:
                        trial = self.journal.trials[number]
                        self.done.append(trial)
                        learned.append((self._learn(trial), trial.slopes))
            if not values or len(learned) < len(values) or len(self.done) == self.settings.budget:
                return
            self.searcher.tell([loss for loss, _ in learned], [slopes for _, slopes in learned])

    def _make(self, values: Mapping[int, Values], end: float) -> None:
        """Make the trials of a round, by number, with the other processes that share the search."""
        while True:
            self.journal.refresh()
            for number, trial_values in values.items():
                self._check(number, trial_values)
                self._report(number)
            missing = [number for number in values if number not in self.journal.trials]
            self._show(len(values) - len(missing))
            if not missing or (self.journal.trials and time.monotonic() >= end):  # one is made however long the start takes
                return
            taken = self.journal.take(missing)
            if taken is None:
                time.sleep(WAIT_SECONDS)
            else:
                self.journal.add(self._try(taken, values[taken]))

    def _check(self, number: int, values: Values) -> None:
        if number in self.journal.trials and not _equal(self.journal.trials[number].values, values):
            what = f"trial {number:,} of the journal has other values than the search asks for now"
            fix = "use the version of weightsmith and cmaes that wrote it, or begin again with --no-resume (resume=False)"
            raise ParameterError(what, where=str(self.journal.path), fix=fix)

    def _report(self, number: int) -> None:
        trial = self.journal.trials.get(number)
        if trial is None or number in self._reported:
            return
        self._reported.add(number)
        self._scored(trial, combined(self.measure.losses(trial), self.measure.objective) if trial.whole else None)

    def _show(self, trials: int) -> None:
        """more: trials of the round that are made."""
        done = len(self.done) + trials
        best = "" if self.best is None else f", best {self.measure.written(self.best[0])} in trial {self.best[1].number:,}"
        self.shown.show(Reading("tuning", done, self.settings.budget, None, f"trial {done:,}{best}"))

    def _learn(self, trial: Trial) -> float:
        """The loss that the searcher is told."""
        if trial.error:
            return math.inf
        loss = self.measure.told(trial)
        if trial.whole and (self.best is None or loss < self.best[0]):
            self.best = loss, trial
        return loss

    def _try(self, number: int, values: Values) -> Trial:
        try:
            return self.measure.score(number, values, self.candidates.prepare(values), slopes=bool(self.searcher.numbers))
        except (PlanError, NonFinite, MethodError, ParameterError) as error:
            problem = error.problems[0] if isinstance(error, PlanError) else error
            return Trial(number, values, error=f"{problem.finding.what} ({problem.finding.where})"[:500])
        except WeightsmithError:
            raise
        except (ArithmeticError, ValueError, np.linalg.LinAlgError) as error:  # of a method
            return Trial(number, values, error=f"{type(error).__name__}: {error}"[:500])

    # ---- the result

    def _write(self, trial: Trial, judged: str) -> str:
        text = self.candidates.fill(trial.values).text
        about = f"Trial {trial.number:,} of {len(self.done):,}, objective {self.measure.objective}. {judged}"
        write_recipe(self.target, text, about.replace("\n", " "))
        return text


def _depends_on_budget(settings: TuneSettings, candidates: Candidates) -> bool:
    """Whether the sequence of candidates depends on how many there may be."""
    return settings.search == "grid" or (settings.search == "cma" and any(tunable.is_choice for tunable in candidates.tunables))


def _equal(a: Sequence[Scalar], b: Sequence[Scalar]) -> bool:
    return [(type(x), x) for x in a] == [(type(x), x) for x in b]
