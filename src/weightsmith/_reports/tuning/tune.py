"""`weightsmith.tune`: candidates are tried until the budget is spent, and the best one is judged on other text, once."""

from __future__ import annotations

import hashlib
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from weightsmith._activations.scored_rows import ScoredRows, together
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
from weightsmith._base.files import expand_user
from weightsmith._base.options import EvaluateSettings, RecipeOptions, RunOptions, TuneSettings, option_error, read_options
from weightsmith._base.options.keywords import TuneKeywords
from weightsmith._execution.progress import Meter, Reading, Silent, watched_meter
from weightsmith._execution.run import resources_of
from weightsmith._planning.planner import Prepared
from weightsmith._planning.planner.prepared import download, missing_files, stream
from weightsmith._planning.recipe import Scalar, Source
from weightsmith._reports.evaluate.opening import Opened, opened, prepare_named
from weightsmith._reports.evaluate.values import RowLosses, score_of
from weightsmith._reports.tuning.candidates import Candidates, Values
from weightsmith._reports.tuning.evaluator import MEMORY_BYTES, Candidate, Evaluator, Reference, Rows
from weightsmith._reports.tuning.evolve import evolution
from weightsmith._reports.tuning.journal import Journal, Trial
from weightsmith._reports.tuning.result import Tuning
from weightsmith._reports.tuning.search import searcher
from weightsmith._reports.tuning.texts import few_of, part, read_texts

PROMOTED = 4
"""One in so many candidates, the best of the recent ones, is scored on all rows."""

RECENT = 16
"""Candidates among which a promoted one is compared."""

MARK = "# Tuned by weightsmith"


def tune(
    recipe: Source,
    out: str | os.PathLike[str],
    *,
    text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    report_text: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    reference: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    progress: bool | Meter = True,
    **options: Unpack[TuneKeywords],
) -> Tuning:
    """Find the values of a recipe with which the merge predicts texts best, and write the recipe with them.

    recipe       as for `merge`, with `{tune: [0, 1]}` in place of numbers and `{choice: [ties, dare_ties]}` of other values;
                 or a config of mergekit-evolve, whose tasks name texts
    out          the recipe to write, `tuned.yml`; the trials are kept beside it in `tuned.trials.jsonl`
    text         .txt, .jsonl or .parquet files to tune on, or `built-in`; none: those that the config names
    report_text  files to judge the result on; none: the last third of the rows of each text
    reference    for `objective="kl"`: a model, or one for each text
    progress     True: a bar in terminals and notebooks, False: none
    options      see `weightsmith._base.options`: `RecipeOptions`, `EvaluateSettings`, `TuneSettings` and `RunOptions`

    No candidate is written. The same call with the same seed makes the same trials, and resumes after a crash or a
    KeyboardInterrupt, which leaves the best recipe so far. A candidate that cannot be merged is a trial without losses.

    Raises PlanError with all problems of recipe, models and texts, before tensor data is read. Raises OutputExists if this
    program did not write the output, ParameterError if no candidate has losses, and Busy or CannotResume as `merge` does.

    Memory: as for a merge, and in addition 4 GiB, or half of `max_memory_bytes`, for the candidate in float32 and the states of
    the rows. If the candidate does not fit, only one layer of it is held.

    >>> found = weightsmith.tune("ties.yml", "tuned.yml", text="fr.txt", budget=200)  # doctest: +SKIP
    >>> found.reading[0]  # doctest: +SKIP
    'The tuned recipe is 3.1 ± 0.7 % better than the start on the report text: perplexity 10.12 against 10.44.'
    """
    names = {"text": text, "report_text": report_text, "reference": reference}
    paths = {name: [value] if isinstance(value, str | os.PathLike) else list(value) for name, value in names.items()}
    given = {**{name: [os.fspath(each) for each in own] for name, own in paths.items()}, **options}
    kinds = RecipeOptions, EvaluateSettings, TuneSettings, RunOptions
    planning, texts, settings, running = read_options("tune", given, *kinds)
    meter = progress if isinstance(progress, Meter) else watched_meter() if progress else Silent()
    with nullcontext(meter) if isinstance(progress, Meter) else meter as shown:
        return tuned(recipe, os.fspath(out), planning, texts, settings, running, shown)


def tuned(
    recipe: Source,
    out: str,
    planning: RecipeOptions,
    texts: EvaluateSettings,
    settings: TuneSettings,
    running: RunOptions,
    shown: Meter,
) -> Tuning:
    """See `tune`."""
    seconds, config = _seconds(settings.time), evolution(recipe)
    if config is not None:
        recipe, texts = config.recipe, replace(texts, text=texts.text or config.texts)
    if not texts.text:
        raise option_error("text", "no text is given", "name a .txt, .jsonl or .parquet file")
    _check_references(settings, texts)
    target = check_output(out)
    with ExitStack() as stack:
        candidates = stack.enter_context(Candidates(recipe, planning))
        search = _Search(candidates, target, planning, texts, settings, running, shown, stack)
        return search.run(seconds)


def _check_references(settings: TuneSettings, texts: EvaluateSettings) -> None:
    if (settings.objective == "kl") != bool(settings.reference):
        if settings.reference:
            raise option_error("reference", "a reference is for the objective kl alone", "add --objective kl (objective='kl')")
        raise option_error("objective", "the objective kl needs a model to compare with", "add --reference MODEL (reference)")
    if settings.reference and len(settings.reference) not in (1, len(texts.text)):
        what = f"{len(settings.reference)} references for {len(texts.text)} texts"
        raise option_error("reference", what, "give one for all texts, or one for each")


_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)", re.IGNORECASE)


def _seconds(text: str | None) -> float:
    """Seconds from `90s`, `30m` or `2h`."""
    if text is None:
        return math.inf
    found = _TIME.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise option_error("time", f"must be a time such as 90s, 30m or 2h, not {text!r}")
    return float(found[1]) * {"s": 1, "h": 3600}.get(found[2].lower(), 60)


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
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:80]}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_mark(rest).encode() + b"\n" + rest)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except OSError as error:
        raise StoreError(f"the recipe cannot be written: {error.strerror}", where=str(path)) from error
    finally:
        Path(name).unlink(missing_ok=True)


# ---- the search


@dataclass(frozen=True, eq=False)
class _Group:
    """Texts that are scored together: those with the same reference. rows: of the few, and of the rest; None for none."""

    texts: tuple[int, ...]
    few: Rows
    rest: Rows | None
    reference: Reference | None


class _Search:
    """One search: its models, rows, evaluator, journal."""

    def __init__(
        self,
        candidates: Candidates,
        target: Path,
        planning: RecipeOptions,
        texts: EvaluateSettings,
        settings: TuneSettings,
        running: RunOptions,
        shown: Meter,
        stack: ExitStack,
    ) -> None:
        self.candidates, self.target, self.settings, self.running, self.shown = candidates, target, settings, running, shown
        self.searcher = searcher(settings.search, candidates.tunables, candidates.start, settings.budget, planning.seed)
        self.first = self._prepare(candidates.start)
        self.one: Opened = opened(candidates.source[0] or "recipe", self.first)
        self.texts = read_texts(self.one, texts.text, settings.report_text, texts.rows, texts.tokens)
        self.few = [few_of(len(rows.ids)) for rows in self.texts.tune]
        self.tokens = [_tokens(rows) for rows in self.texts.tune]
        memory = running.max_memory_bytes
        budget = MEMORY_BYTES if memory is None else memory // 2
        resources = resources_of(self.first.plan, running)
        self.evaluator = Evaluator(self.one, resources, budget, allow_nonfinite=running.allow_nonfinite)
        self.references = [self._open_reference(name, stack) for name in settings.reference]
        about = self._about(planning)
        path = target.with_suffix(".trials.jsonl")
        counts = [len(rows.ids) for rows in self.texts.tune]
        n_values = len(candidates.tunables)
        self.journal = stack.enter_context(Journal(path, about, counts, n_values, resume=running.resume))
        self.groups: list[_Group] = []
        self.few_losses: list[float] = []
        self.offset = 0.0
        self.best: tuple[float, Trial] | None = None
        self.done: list[Trial] = []

    def _prepare(self, values: Values) -> Prepared:
        prepared = self.candidates.prepare(values)
        if self.running.stream:
            stream(prepared.inputs)
        if missing_files(prepared.inputs):
            download(prepared.inputs)
        return prepared

    def _open_reference(self, name: str, stack: ExitStack) -> tuple[Prepared, Opened]:
        prepared = stack.enter_context(prepare_named(name))
        if missing_files(prepared.inputs):
            download(prepared.inputs)
        found = opened(name, prepared)
        if not self.evaluator.fits(prepared.plan):
            fix = "compare with a model of the merge's family, size and tokenizer"
            raise ParameterError("its tensors are not those of the merge", where=name, fix=fix, state=NOTHING_WRITTEN)
        return prepared, found

    def _about(self, planning: RecipeOptions) -> dict[str, Any]:
        """Description of the search: the first line of the journal."""
        states = [model.state for model in self.first.inputs]
        for i, each in enumerate(self.candidates.tunables):
            for choice in each.choices if each.chooses_models else ():
                start = self.candidates.start
                states += [model.state for model in self._prepare((*start[:i], choice, *start[i + 1 :])).inputs]
        states += [model.state for prepared, _ in self.references for model in prepared.inputs]
        return {
            "recipe": hashlib.sha256(self.candidates.text.encode()).hexdigest(),
            "models": hashlib.sha256("\n".join(states).encode()).hexdigest(),
            "texts": self.texts.identity,
            "search": self.settings.search,
            "budget": self.settings.budget if _depends_on_budget(self.settings, self.candidates) else None,
            "objective": self.settings.objective,
            "seed": planning.seed,
            "options": repr(replace(planning, settings={})),
        }

    def run(self, seconds: float) -> Tuning:
        """Try candidates, and judge the best. KeyboardInterrupt leaves the best so far."""
        began = time.monotonic()
        earlier = list(self.journal.trials)
        try:
            self._search(earlier, began, seconds)
        except KeyboardInterrupt:
            if self.best is not None:
                self._write(self.best[1], f"Interrupted after {len(self.done):,} trials, and not judged on other text yet.")
            raise
        if self.best is None:
            causes = list(dict.fromkeys(trial.error for trial in self.done))
            what = f"none of {len(self.done):,} candidates could be scored"
            raise NonFinite(what, where=str(self.journal.path), details=causes[:3], fix="tune in other ranges")
        return self._judged(self.best[1], time.monotonic() - began, len(earlier))

    def _search(self, earlier: Sequence[Trial], began: float, seconds: float) -> None:
        budget = self.settings.budget
        while len(self.done) < budget and (len(self.done) < len(earlier) or time.monotonic() - began < seconds):
            asked = self.searcher.ask()
            if asked is None:
                break
            values, number = self.candidates.rounded(asked), len(self.done) + 1
            if number <= len(earlier):
                trial = earlier[number - 1]
                if not _equal(trial.values, values):
                    what = f"trial {number:,} of the journal has other values than the search asks for now"
                    fix = (
                        "use the version of weightsmith and cmaes that wrote it, or begin again with --no-resume (resume=False)"
                    )
                    raise ParameterError(what, where=str(self.journal.path), fix=fix)
            else:
                trial = self._try(number, values)
                self.journal.add(trial)
            self.done.append(trial)
            self.searcher.tell(asked, self._learn(trial))
            self._show(began)

    def _show(self, began: float) -> None:
        best = "" if self.best is None else f", best {self._written(self.best[0])} in trial {self.best[1].number:,}"
        self.shown.show(Reading("tuning", len(self.done), self.settings.budget, None, f"trial {len(self.done):,}{best}"))

    def _written(self, loss: float) -> str:
        return f"KL {loss:.4f}" if self.settings.objective == "kl" else f"perplexity {math.exp(min(loss, 700)):.4g}"

    def _learn(self, trial: Trial) -> float:
        """The loss that the searcher is told: of all rows, or estimated from the few."""
        if trial.error:
            return math.inf
        few = self.objective(trial, self.few)
        self.few_losses.append(few)
        if not trial.whole:
            return few + self.offset
        loss = self.objective(trial)
        if self.best is None:
            self.offset = loss - few
        if self.best is None or loss < self.best[0]:
            self.best = loss, trial
        return loss

    def objective(self, trial: Trial, numbers: Sequence[Sequence[int]] | None = None) -> float:
        """The loss of a trial. numbers: the rows of each text that count; None: all."""
        losses = self.losses(trial, numbers)
        return max(losses) if self.settings.objective == "worst" else sum(losses) / len(losses)

    def losses(self, trial: Trial, numbers: Sequence[Sequence[int]] | None = None) -> list[float]:
        """The loss of each text, in nats for a token."""
        sums = trial.divergences if self.settings.objective == "kl" else trial.nats
        found = []
        for i, own in enumerate(sums):
            places = range(len(own)) if numbers is None else numbers[i]
            found.append(sum(own[k] or 0.0 for k in places) / float(self.tokens[i][list(places)].sum()))
        return found

    def _try(self, number: int, values: Values) -> Trial:
        try:
            prepared = self._prepare(values)
            candidate = Candidate.of(prepared.plan, prepared.inputs)
            return self._scored(number, values, candidate)
        except (PlanError, NonFinite, MethodError, ParameterError) as error:
            problem = error.problems[0] if isinstance(error, PlanError) else error
            return Trial(number, values, error=f"{problem.finding.what} ({problem.finding.where})"[:500])
        except WeightsmithError:
            raise
        except (ArithmeticError, ValueError, np.linalg.LinAlgError) as error:  # of a method
            return Trial(number, values, error=f"{type(error).__name__}: {error}"[:500])

    def _scored(self, number: int, values: Values, candidate: Candidate) -> Trial:
        if not self.groups:
            self.groups = self._grouped()
        nats: list[list[float | None]] = [[None] * len(rows.ids) for rows in self.texts.tune]
        divergences = [list(own) for own in nats]

        def enter(group: _Group, rows: Rows, numbers: Mapping[int, Sequence[int]]) -> None:
            found, others = self.evaluator.losses(candidate, rows, group.reference)
            at = 0
            for i, places in numbers.items():
                for k in places:
                    nats[i][k] = float(found[at])
                    if others is not None:
                        divergences[i][k] = float(others[at])
                    at += 1

        def trial() -> Trial:
            own = tuple(map(tuple, divergences)) if self.settings.objective == "kl" else ()
            return Trial(number, values, tuple(map(tuple, nats)), own)

        for group in self.groups:
            enter(group, group.few, {i: self.few[i] for i in group.texts})
        if self._promotes(self.objective(trial(), self.few)):
            for group in self.groups:
                if group.rest is not None:
                    enter(group, group.rest, {i: self._rest(i) for i in group.texts})
        return trial()

    def _promotes(self, few: float) -> bool:
        """Whether a candidate is to be scored on all rows: it is among the best quarter of the recent ones."""
        recent = sorted(self.few_losses[-RECENT:])
        return self.best is None or few <= recent[min(len(recent) - 1, max(0, len(recent) // PROMOTED - 1))]

    def _rest(self, i: int) -> list[int]:
        few = set(self.few[i])
        return [k for k in range(len(self.texts.tune[i].ids)) if k not in few]

    def _grouped(self) -> list[_Group]:
        n = len(self.texts.tune)
        several = len(self.references) > 1
        groups = []
        for texts in [(i,) for i in range(n)] if several else [tuple(range(n))]:
            few = Rows.of(together([part(self.texts.tune[i], self.few[i]) for i in texts]))
            left = [part(self.texts.tune[i], self._rest(i)) for i in texts if self._rest(i)]
            rest = Rows.of(together(left)) if left else None
            reference = None
            if self.references:
                prepared, _ = self.references[texts[0] if several else 0]
                wanted = [rows for rows in (few, rest) if rows is not None]
                reference = self.evaluator.reference(Candidate.of(prepared.plan, prepared.inputs), wanted)
            groups.append(_Group(texts, few, rest, reference))
        return groups

    # ---- the result

    def _write(self, trial: Trial, judged: str) -> str:
        text = self.candidates.fill(trial.values).text
        about = f"Trial {trial.number:,} of {len(self.done):,}, objective {self.settings.objective}. {judged}"
        write_recipe(self.target, text, about.replace("\n", " "))
        return text

    def _judged(self, best: Trial, seconds: float, resumed: int) -> Tuning:
        """Score the best candidate, the start and the base on the text of the report."""
        wanted: dict[str, Prepared] = {"tuned": self._prepare(best.values), "start": self.first}
        scores: dict[str, list[RowLosses]] = {}
        with ExitStack() as stack:
            base = self._base()
            if base is not None:
                wanted["base"] = stack.enter_context(base)
            rows = Rows.of(together(self.texts.report))
            for name, prepared in wanted.items():
                self.shown.say(f"judging on the text of the report: {name}")
                found, _ = self.evaluator.losses(Candidate.of(prepared.plan, prepared.inputs), rows, keep=False)
                scores[name] = list(_by_text(found, self.texts.report))
        judged = {name: tuple(score_of(a, None) for a in own) for name, own in scores.items()}
        against = {
            name: tuple(score_of(a, b) for a, b in zip(scores["tuned"], own, strict=True))
            for name, own in scores.items()
            if name != "tuned"
        }
        objectives = {trial.number: self.losses(trial) for trial in self.done if trial.whole}
        tuning = Tuning(
            out=self.target,
            recipe=self.candidates.fill(best.values).text,
            names=tuple(each.name for each in self.candidates.tunables),
            start=self.candidates.start,
            best=best.number,
            trials=tuple(self.done),
            resumed=resumed,
            objective=self.settings.objective,
            texts=self.texts.names,
            losses=objectives,
            report_texts=self.texts.report_names,
            judged=judged,
            against=against,
            rows=(sum(len(r.ids) for r in self.texts.tune), sum(len(r.ids) for r in self.texts.report)),
            few_rows=sum(map(len, self.few)),
            seconds=seconds,
            journal=self.journal.path,
        )
        self._write(best, tuning.reading[0])
        return tuning

    def _base(self) -> Prepared | None:
        """The base of the recipe, if it is a model of the same tensors."""
        name = self.candidates.base
        if name is None:
            return None
        try:
            found = prepare_named(name)
        except PlanError:
            return None
        if self.evaluator.fits(found.plan):
            return found
        found.close()
        return None


def _depends_on_budget(settings: TuneSettings, candidates: Candidates) -> bool:
    """Whether the sequence of candidates depends on how many there may be."""
    return settings.search == "grid" or (settings.search == "cma" and any(each.is_choice for each in candidates.tunables))


def _equal(a: Sequence[Scalar], b: Sequence[Scalar]) -> bool:
    return [(type(x), x) for x in a] == [(type(x), x) for x in b]


def _tokens(rows: ScoredRows) -> np.ndarray:
    found: np.ndarray = (rows.nbytes >= 0).sum(1).astype(np.float64)
    return found


def _by_text(nats: np.ndarray, texts: Sequence[ScoredRows]) -> Iterator[RowLosses]:
    start = 0
    for rows in texts:
        own = nats[start : start + len(rows.ids)]
        nbytes = np.where(rows.nbytes >= 0, rows.nbytes, 0).sum(1).astype(np.float64)
        yield RowLosses(own, _tokens(rows), nbytes, None, None, rows.sha256)
        start += len(rows.ids)
