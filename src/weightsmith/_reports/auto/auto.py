"""`weightsmith.auto`: candidates are measured on held-back text, and the best one is written if it beats the mean.

    texts ─▶ references ─▶ strengths ─▶ statistics ─▶ RegMean ─▶ choice ─▶ merge

Everything that takes time is kept in the folder OUT.auto: texts, statistics, scores. The same call takes it up again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from weightsmith._activations.decoder.forward import fast_arithmetic
from weightsmith._activations.options import StatisticsSettings
from weightsmith._activations.rows import text_source
from weightsmith._activations.stored import is_stored, read_stored
from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    Busy,
    CannotResume,
    CheckpointError,
    FormatError,
    NonFinite,
    OutputExists,
    ParameterError,
    PlanError,
    StoreError,
    WeightsmithError,
)
from weightsmith._base.files import exists, expand_user, is_folder, write_whole
from weightsmith._base.options import lists_options, option_error, read_options
from weightsmith._base.text import count, size
from weightsmith._base.torch_use import usable_device
from weightsmith._engine.results import JobMemory
from weightsmith._execution.execute import execute
from weightsmith._execution.identity import program_digest
from weightsmith._execution.options import RunOptions, resources_of
from weightsmith._execution.progress import Meter, callbacks, shown_meter
from weightsmith._execution.run import protected_paths
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._features.statistics import prepare_statistics
from weightsmith._methods.regmean import WEIGHED
from weightsmith._models.checkpoint import Checkpoint
from weightsmith._outputs import disk
from weightsmith._outputs.local import check_not_a_file, check_not_read, check_out, check_vacant
from weightsmith._outputs.manifest import MANIFEST_NAME
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.planner.prepared import download, missing_files, stream
from weightsmith._reports.auto.checks import check_copies, check_models, check_texts
from weightsmith._reports.auto.cost import STATISTICS, DiskUse, SearchPlan, SearchSize, disk_use, plan_search
from weightsmith._reports.auto.pool import (
    KIND,
    Choice,
    Journal,
    Models,
    Pool,
    Recipe,
    RowScores,
    Scores,
    choose,
    difference,
    is_journal,
    kept_bytes,
    score,
    strength,
    too_far,
)
from weightsmith._reports.auto.result import Auto, CandidateScore, FineTune
from weightsmith._reports.auto.write import TEXTS, CutText, TextPair, recorded, row_tokens, write_own
from weightsmith._reports.command import seconds_of
from weightsmith._reports.evaluate.opening import Opened, opened, prepare_named
from weightsmith._reports.options import AutoSettings

if TYPE_CHECKING:
    from weightsmith._reports.keywords import AutoKeywords

SUM_STRENGTHS, TSV_STRENGTHS = (0.6, 1.0), (0.4, 0.8)
"""Scored beside 0, which is the base, and for sums 1/N, which is the mean."""

FACTORS = (0.6, 1.4)
"""Factors of RegMean's result that are tried if texts are given: without texts, no score sees that deltas are too long."""

FEWEST, MOST = 2, 10
MEAN, SUM, TSV, REGMEAN_TSV, REGMEAN_SUM = "mean", "sum", "tsv_m", "regmean, prior tsv_m", "regmean, prior sum"
CANDIDATES = ((REGMEAN_TSV, TSV), (TSV, TSV), (REGMEAN_SUM, SUM), (SUM, SUM))
"""In the order in which they are scored, each with the merge whose strength it takes."""


@lists_options("auto", AutoSettings, RunOptions, besides=("text",))
def auto(
    base: str | os.PathLike[str],
    fine_tunes: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    text: Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]] | None = None,
    progress: bool | Meter = True,
    **options: Unpack[AutoKeywords],
) -> Auto:
    """Measure several merges of fine-tunes of one base, and write the best.

    base        the model that all were trained from: a folder or Hub id
    fine_tunes  two to ten folders, Hub ids or `base+adapter`
    out         a new folder; texts, scores and the page are kept beside it in `OUT.auto`
    text        a .txt, .jsonl or .parquet file for each fine-tune, by its name (the last part of its path), or as `NAME=FILE`.
                None: each fine-tune writes text of its own
    progress    True: a bar in terminals and notebooks, False: none

    Candidates are the sum of all deltas and task singular vectors, at strengths that a parabola finds, and RegMean with these
    as its prior. They are scored on held-back rows: by the cross entropy of the texts, or without texts by the KL divergence
    from the fine-tunes. The winner is written if it beats the plain mean by two standard errors; otherwise the mean is.
    OUT/recipe.yml repeats the merge, to the byte.

    Raises PlanError, ParameterError, MismatchError, OutputExists, NonFinite, before anything is written in OUT.

    Memory: a model in float32 twice, the statistics of all fine-tunes, and predictions of the held-back rows.

    >>> result = weightsmith.auto("base", ["fr", "de"], "merged")  # doctest: +SKIP
    >>> result.reading[0]  # doctest: +SKIP
    'merged is regmean, prior tsv_m: 0.0214 ± 0.0052 nats a token better than the mean on held-back text.'
    """
    began = time.monotonic()
    models, settings, running = _asked(base, fine_tunes, text, options)
    out = os.fspath(out).rstrip("/") or "/"
    names = _names(models)
    texts = _texts_of(settings, models, names)
    seconds = seconds_of("time", settings.time)
    folder = _work_folder(out, running)
    with ExitStack() as stack:
        shown = stack.enter_context(shown_meter(progress))
        one, models, opened_models = _opened(models, expand_user(out), stack)
        device = usable_device(resources_of(one.prepared, running).device)
        cut_texts = check_texts(one, texts)
        check_models(one, models, cut_texts)
        missing = _missing(opened_models, running)
        use = _checked_disk(one, len(names), folder, missing)
        if missing:
            shown.say(f"downloading {count(len(missing), 'file')}, {size(use.download)}")
            download(opened_models)
            check_copies(models)
        stack.enter_context(_resumable(folder))
        folder.mkdir(exist_ok=True)
        stack.enter_context(_alone_in(folder, out))
        about = {
            "kind": KIND,
            "program": program_digest(),
            "models": [model.state for model in opened_models],
            "products": [device, fast_arithmetic(device)],
        }
        journal = Journal(folder / _SCORES, about, resume=running.resume)
        pairs = _pairs(one, models, names, cut_texts, folder, settings, running, shown)
        memory = JobMemory(folder, spare_bytes=use.searching)
        search = _Search(one, models, names, pairs, folder, journal, memory, settings, began + seconds, running, shown)
        result = search.run()
        name = result.choice.name
        recipe = search.written_recipe(name)
        whole = expand_user(out).absolute()
        result = replace(result, out=whole, work=folder.absolute(), recipe=recipe, seconds=time.monotonic() - began)
        result.report().write(folder / PAGE)  # a process that is killed after the merge is not run again
        search.merge(name, recipe, out, opened_models, began)
        shutil.rmtree(folder / STATISTICS, ignore_errors=True)
        result = replace(result, seconds=time.monotonic() - began)
        result.report().write(folder / PAGE)
        return result


@lists_options("auto", AutoSettings, RunOptions, besides=("text",))
def plan_auto(
    base: str | os.PathLike[str],
    fine_tunes: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    text: Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]] | None = None,
    **options: Unpack[AutoKeywords],
) -> SearchPlan:
    """What `auto` would do with the same arguments: its stages, and an estimate of time, memory and disk. Writes nothing.

    Reads headers, and multiplies matrices for 0.2 s to see how fast this machine is. Raises as `auto` does before it starts.

    >>> plan = weightsmith.plan_auto("base", ["fr", "de"], "merged")  # doctest: +SKIP
    >>> round(plan.processor_seconds), plan.memory_bytes  # doctest: +SKIP
    (311, 1830000000)
    """
    models, settings, running = _asked(base, fine_tunes, text, options)
    out = os.fspath(out)
    names = _names(models)
    texts = _texts_of(settings, models, names)
    seconds_of("time", settings.time)
    folder = _work_folder(out, running)
    with ExitStack() as stack:
        one, models, opened_models = _opened(models, expand_user(out), stack)
        check_models(one, models, check_texts(one, texts))
        candidates = min(settings.budget, 7 if texts else 4)
        search = SearchSize(len(names), row_tokens(one), candidates, bool(texts), kept_bytes(running))
        use = disk_use(one, len(names), folder, _missing(opened_models, running))
        return plan_search(one, expand_user(out).absolute(), use, search, resources_of(one.prepared, running))


def _asked(
    base: str | os.PathLike[str],
    fine_tunes: Sequence[str | os.PathLike[str]],
    text: Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]] | None,
    options: Mapping[str, Any],
) -> tuple[Models, AutoSettings, RunOptions]:
    texts = _written_texts(text) if isinstance(text, Mapping) else text or ()
    settings, running = read_options("auto", {"text": texts, **options}, AutoSettings, RunOptions)
    return Models.of(os.fspath(base), [os.fspath(model) for model in fine_tunes]), settings, running


def _written_texts(text: Mapping[str, object]) -> list[str]:
    """Texts by fine-tune, as the command line has them: `MODEL=FILE`. Raises PlanError for what is no path."""
    files = {name: os.fspath(path) for name, path in text.items() if isinstance(path, str | os.PathLike)}
    problems = [
        option_error(
            "text", f"the text for {name!r} must be the path of a file, not {path!r}", "name a file for each fine-tune"
        )
        for name, path in text.items()
        if name not in files
    ]
    if problems:
        raise PlanError(problems)
    return [f"{name}={path}" for name, path in files.items()]


PAGE = "index.html"


def _names(models: Models) -> tuple[str, ...]:
    """A short name for each fine-tune. Raises ParameterError for too few or too many."""
    if not FEWEST <= len(models.fine_tunes) <= MOST:
        what = f"{FEWEST} to {MOST} fine-tunes can be merged, not {len(models.fine_tunes)}"
        raise ParameterError(what, fix="write weightsmith auto BASE MODEL MODEL... OUT", state=NOTHING_WRITTEN)
    _check_distinct(models.names, [_place(model) for model in models.names])
    short = [_short(name) for name in models.fine_tunes]
    while len({name.casefold() for name in short}) < len(short):
        short = [f"{name}-{i}" for i, name in enumerate(short, 1)]
    return tuple(short)


def _check_distinct(models: Sequence[str], places: Sequence[str]) -> None:
    """Raise ParameterError for two models at one place."""
    if twice := [model for model, place in zip(models, places, strict=True) if places.count(place) > 1]:
        what, fix = "a model is named twice", "name each model once, the base first"
        raise ParameterError(what, where=twice[-1], fix=fix, state=NOTHING_WRITTEN)


def _place(model: str) -> str:
    """Equal for two names of one folder."""
    path = expand_user(model)
    return str(path.resolve()) if exists(path) else model


def _short(model: str) -> str:
    """The last part of a model's name: of `org/fr@main`, `./models/fr` and `base+fr` it is `fr`."""
    name = Path(model.rpartition("+")[2].partition("@")[0]).name
    return Path(model).resolve().name or "model" if name in ("", "..") else name


def _texts_of(settings: AutoSettings, models: Models, names: Sequence[str]) -> dict[str, str]:
    """The file of each fine-tune, by its short name; {} if none is given. Raises PlanError."""
    problems, files = list[WeightsmithError](), dict[str, str]()
    known = {model.rpartition("+")[2]: name for model, name in zip(models.fine_tunes, names, strict=True)}
    known |= dict(zip(models.fine_tunes, names, strict=True)) | {name: name for name in names}
    for written in settings.text:
        model, equals, path = _parted(written, known)
        if not equals or not path:
            problems.append(option_error("text", f"{written!r} names no file", "write MODEL=FILE"))
        elif model not in known:
            problems.append(option_error("text", f"there is no fine-tune {model!r}", f"name one of {', '.join(names)}"))
        elif known[model] in files:
            problems.append(option_error("text", f"there are two texts for {known[model]}", "give one file for each fine-tune"))
        else:
            files[known[model]] = path
    missing = [name for name in names if name not in files]
    if files and missing and not problems:
        what = f"there is no text for {', '.join(missing)}"
        problems.append(option_error("text", what, "give a text for each fine-tune, or for none: each then writes its own"))
    if problems:
        raise PlanError(problems)
    return files


def _parted(written: str, names: Iterable[str]) -> tuple[str, str, str]:
    """`MODEL=FILE` at the sign that follows a name of `names`, the longest one: names may have a `=`, as `lr=1e-5`."""
    name = max((name for name in names if written.startswith(f"{name}=")), key=len, default="")
    return (name, "=", written[len(name) + 1 :]) if name else written.partition("=")


def _work_folder(out: str, running: RunOptions) -> Path:
    """Raises ParameterError for an output that is no folder on this disk; OutputExists."""
    if "://" in out:
        raise ParameterError(
            "the output must be a folder on this disk",
            where=out,
            fix="write it here, then push it with run or merge",
            state=NOTHING_WRITTEN,
        )
    check_not_a_file(out)
    path = expand_user(out)
    if not path.name or path.name == "..":
        raise ParameterError("the output has no name", where=out, fix="name a new folder", state=NOTHING_WRITTEN)
    if not is_folder(path.parent):
        raise StoreError(f"there is no folder {path.parent}", where=out, fix="create it", state=NOTHING_WRITTEN)
    if os.path.lexists(path) and not running.overwrite:
        fix = "choose another name, or add --overwrite"
        if not exists(path / MANIFEST_NAME):  # a model of the user, where the order was mistaken
            fix = "name a folder that does not exist as the last argument: weightsmith auto BASE MODEL MODEL... OUT"
        raise OutputExists("the output exists", where=out, fix=fix, state=NOTHING_WRITTEN)
    check_vacant(check_out(path), overwrite=running.overwrite)
    folder = path.with_name(f"{path.name}.auto")
    if os.path.lexists(folder) and not _is_ours(folder):
        what = "the folder for unfinished work exists, and weightsmith auto did not make it"
        raise OutputExists(what, where=str(folder), fix="choose another output", state=NOTHING_WRITTEN)
    return folder


_SCORES = "scores.jsonl"


def _is_ours(folder: Path) -> bool:
    """Whether a folder is one that `auto` made, or empty."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return is_journal(folder / _SCORES) or not any(folder.iterdir())


@contextmanager
def _alone_in(folder: Path, out: str) -> Iterator[None]:
    """Keep other calls of `auto` out of the folder, where the file system has locks. Raises Busy."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            disk.lock(handle)
        except BlockingIOError:
            what, fix = "another process is searching for this output now", "wait until it has ended, or choose another output"
            raise Busy(what, where=out, fix=fix, state=NOTHING_WRITTEN) from None
        yield
    finally:
        os.close(handle)


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Make errors of the block say what is kept. A file that cannot be written becomes a StoreError."""
    kept = f"Nothing was merged. {folder} keeps what is finished: run the same command again to resume."
    try:
        yield
    except WeightsmithError as error:
        error.state = error.state or kept
        raise
    except OSError as error:
        what, fix = f"it cannot be written: {error.strerror}", "free space there, or choose another output"
        raise StoreError(what, where=str(folder), fix=fix, state=kept) from error


def _opened(models: Models, out: Path, stack: ExitStack) -> tuple[Opened, Models, Sequence[Checkpoint]]:
    """The mean, whose tokenizer cuts texts; the models with the commits of those on the Hub; and all of them, opened.

    Raises PlanError, ParameterError for two names of one model, and StoreError if one is in the output folder.
    """
    prepared = stack.enter_context(prepare_any(models.sum(1.0), RecipeOptions(), QuantizeSettings()))
    check_not_read(out, protected_paths(prepared))
    pinned = models.pinned(prepared)
    _check_distinct(models.names, pinned.names)
    return opened(MEAN, stack.enter_context(prepare_named(pinned.mean()))), pinned, prepared.inputs


def _missing(models: Sequence[Checkpoint], running: RunOptions) -> dict[Path, int]:
    """The files to download before the first candidate is scored, with their sizes."""
    if running.stream:
        stream(models)
    return missing_files(models)


def _checked_disk(one: Opened, models: int, folder: Path, missing: Mapping[Path, int]) -> DiskUse:
    """The disk space that the search needs. missing: files to download. Raises NoSpace if less is free."""
    use = disk_use(one, models, folder, missing)
    if use.needed > use.free:
        raise disk.no_space(folder.parent, use.needed, state=NOTHING_WRITTEN)
    return use


def _pairs(
    one: Opened,
    models: Models,
    names: Sequence[str],
    texts: Mapping[str, CutText],
    folder: Path,
    settings: AutoSettings,
    running: RunOptions,
    shown: Meter,
) -> list[TextPair]:
    pairs = []
    for number, (name, model) in enumerate(zip(names, models.fine_tunes, strict=True), 1):
        if texts:
            pairs.append(texts[name].write(name, folder))
        else:
            shown.say(f"text 1/5: {name} writes text of its own ({number} of {len(names)})")
            pairs.append(write_own(name, model, row_tokens(one), folder, settings.seed, running, shown))
    return pairs


@dataclass(eq=False)
class _Search:
    """The candidates of one call, by name.

    until    no candidate begins after this `time.monotonic()`
    folders  statistics of the fine-tunes; [] while there are none
    memory   of the candidates' jobs
    """

    one: Opened
    models: Models
    names: Sequence[str]
    pairs: Sequence[TextPair]
    folder: Path
    journal: Journal
    memory: JobMemory
    settings: AutoSettings
    until: float
    running: RunOptions
    shown: Meter

    def __post_init__(self) -> None:
        self._strengths = dict[str, float]()
        self._factors = dict[str, float]()
        self._scored = dict[str, Scores]()
        self._failed = dict[str, str]()
        self._tokens = row_tokens(self.one)
        self._stopped = False
        self.with_texts = bool(self.settings.text)
        self.folders: list[str] = []
        self._digests: list[str] = []

    @property
    def measure(self) -> str:
        """The score that chooses."""
        return "nats" if self.with_texts else "divergences"

    def run(self) -> Auto:
        """Measure and choose."""
        held = [pair.held for pair in self.pairs]
        self.shown.say("references 2/5: the fine-tunes on their own rows")
        pool = Pool(self.one, held, self._tokens, self.running, self.journal, self.memory)
        alone = pool.refer(self.models)
        self.shown.say("strengths 3/5: the base and the mean")
        base = pool.scores(self.models.sum(0.0), label=self.models.label(self.models.base))
        self._check_differ(alone, base)
        self._scored = {MEAN: pool.scores(self.models.mean())}
        choice = None if self.with_texts else too_far(score(base, "divergences"), MEAN)
        if choice is None:
            self._measure_all(pool)
            choice = self._choose()
        return Auto(
            out=self.folder,
            work=self.folder,
            recipe="",
            choice=choice,
            with_texts=self.with_texts,
            candidates=tuple(self._summary(name) for name in self._scored),
            fine_tunes=tuple(self._fine_tune(i, alone, base) for i in range(len(self.names))),
            rows=tuple(pool.rows),
            failed=self._failed,
            stopped=self._stopped,
            seconds=0.0,
        )

    def written_recipe(self, name: str) -> str:
        """The recipe of a candidate that goes into the output. It names the texts."""
        with prepare_any(self.recipe(name), RecipeOptions(), QuantizeSettings()) as prepared:
            return prepared.plan.recipe

    def merge(self, name: str, recipe: str, out: str, models: Sequence[Checkpoint], began: float) -> None:
        """Write the merge of a candidate. It reads what was measured on the texts that its recipe names.

        models  all of them, as they were opened for the search
        """
        self.shown.say(f"writing {name}")
        with prepare_any(self.recipe(name, self.folders), RecipeOptions(), QuantizeSettings()) as prepared:
            repeatable = prepared.draft_again()
            repeatable.draft.recipe = recipe
            # What the search remembers is of the files as they were: this merge opens them again.
            for model in models:
                model.check_unchanged()
            telling = callbacks(self.shown, "merging")
            execute(repeatable.finish(), out, self.running, telling, began=began, memory=self.memory)

    def _choose(self) -> Choice:
        usual = next((name for name, _ in CANDIDATES if name in self._scored), None)
        if usual is None:
            return Choice(MEAN, "no candidate has finite numbers")
        return choose(self._scored, usual, MEAN, with_texts=self.with_texts)

    def _scores(self, pool: Pool, name: str, recipe: Recipe, *, few: bool = False, measured: bool = False) -> Scores | None:
        """The scores of a candidate. None if its numbers, or its predictions, are not finite: it is left out, and named.

        measured  the recipe names statistics
        """
        try:
            return pool.scores(recipe, few=few, measured_on=self._digests if measured else (), label=name)
        except NonFinite as error:
            where = error.finding.where
            self._failed[name] = error.finding.what if where == name else f"{where}: {error.finding.what}"
            return None

    def _check_differ(self, alone: Sequence[RowScores], base: Scores) -> None:
        for name, mine, basis in zip(self.names, alone, base, strict=True):
            if not basis.divergences.any() and (mine.nats == basis.nats).all():
                fix = "leave it out, or name the fine-tune that was meant"
                raise ParameterError("it predicts exactly what the base predicts", where=name, fix=fix, state=NOTHING_WRITTEN)

    def _measure_all(self, pool: Pool) -> None:
        """Score the candidates, the one that is usually best first, while number and time allow."""
        for prior in dict.fromkeys(prior for _, prior in CANDIDATES[: self.settings.budget]):
            if not self._strengths or time.monotonic() < self.until:
                self._strengths[prior] = self._strength(pool, prior)
        self.folders = [self._statistics(i) for i in range(len(self.names))]
        self._digests = [hashlib.sha256(pair.statistics.read_bytes()).hexdigest() for pair in self.pairs]
        for name, prior in CANDIDATES:
            if prior not in self._strengths or not self._may_score():
                self._stopped = True
                return
            self.shown.say(f"candidates 5/5: {name}")
            if name == REGMEAN_SUM:
                self.memory.read_once(WEIGHED)  # no candidate after this one needs it
            self._score(pool, name)
        if self.with_texts and REGMEAN_TSV in self._scored:
            self._scale(pool)

    def _score(self, pool: Pool, name: str) -> Scores | None:
        scores = self._scores(pool, name, self.recipe(name, self.folders), measured=True)
        if scores is not None:
            self._scored[name] = scores
        return scores

    def _may_score(self) -> bool:
        """Whether another candidate may begin. The first always may."""
        candidates = len(self._scored) - 1
        self._stopped = bool(candidates) and (candidates >= self.settings.budget or time.monotonic() >= self.until)
        return not self._stopped

    def _strength(self, pool: Pool, name: str) -> float:
        """The best strength of `sum` or `tsv_m`, by a parabola."""
        recipes: dict[float, Mapping[str, Any]] = {0.0: self.models.sum(0.0)}
        if name == SUM:
            recipes |= {1 / len(self.names): self.models.mean()} | {x: self.models.sum(x) for x in SUM_STRENGTHS}
        else:
            recipes |= {x: self.models.tsv(x) for x in TSV_STRENGTHS}
        points = dict[float, float]()
        for place, recipe in recipes.items():
            self.shown.say(f"strengths 3/5: {name} at {place:.3g}")
            scores = self._scores(pool, f"{name} at {place:.3g}", recipe, few=True)
            if scores is not None:
                points[place] = score(scores, self.measure)
        return strength(points)

    def _scale(self, pool: Pool) -> None:
        """RegMean's result times factors: with texts, the score sees deltas that are too long or too short."""
        points = {1.0: score(self._scored[REGMEAN_TSV], "nats")}
        for factor in FACTORS:
            if not self._may_score():
                return
            scores = self._factored(pool, factor)
            if scores is not None:
                points[factor] = score(scores, "nats")
        best = strength(points)
        if min(abs(best - factor) for factor in points) > 0.05 and self._may_score():
            self._factored(pool, best)

    def _factored(self, pool: Pool, factor: float) -> Scores | None:
        name = f"{REGMEAN_TSV}, times {factor:g}"
        self._factors[name] = factor
        self.shown.say(f"candidates 5/5: {name}")
        return self._score(pool, name)

    def recipe(self, name: str, statistics: Sequence[str] = ()) -> dict[str, Any]:
        """A candidate as a recipe. statistics: folders in place of the texts, for RegMean."""
        if name == MEAN:
            return self.models.mean()
        if name == SUM:
            return self.models.sum(self._strengths[SUM])
        if name == TSV:
            return self.models.tsv(self._strengths[TSV])
        texts: Sequence[object] = statistics or [{"file": str(pair.statistics), "tokens": self._tokens} for pair in self.pairs]
        prior, which = ("task_arithmetic", SUM) if name == REGMEAN_SUM else ("tsv_m", TSV)
        return self.models.regmean(texts, prior, self._strengths[which], self._factors.get(name, 1.0))

    def _statistics(self, number: int, *, resume: bool = True) -> str:
        """The folder of a fine-tune's statistics. Those that this program measured on the same text earlier are kept.

        resume  take up a measurement that was interrupted. One of another program or text is discarded.
        """
        name, model, pair = self.names[number], self.models.fine_tunes[number], self.pairs[number]
        folder = self.folder / STATISTICS / name
        folder.parent.mkdir(exist_ok=True)
        self.shown.say(f"statistics 4/5: {name} ({number + 1} of {len(self.names)})")
        settings = StatisticsSettings(kind=("second_moments",), tokens=self._tokens)
        record = self.folder / TEXTS / f"{name}.measured"
        with prepare_statistics(model, pair.statistics, settings) as prepared:
            by_this_program = recorded(record) == program_digest()
            if by_this_program and _is_current(folder, prepared.inputs[0].state, pair.statistics, self._tokens):
                return str(folder)
            record.unlink(missing_ok=True)
            running = replace(self.running, card=False, overwrite=True, resume=self.running.resume and resume)
            try:
                execute(prepared, str(folder), running, callbacks(self.shown, f"measuring {name}"), began=time.monotonic())
            except CannotResume:
                return self._statistics(number, resume=False)
        write_whole(record, program_digest().encode())
        return str(folder)

    def _summary(self, name: str) -> CandidateScore:
        scores, mean = self._scored[name], self._scored[MEAN]
        which = SUM if name == SUM else TSV if name == TSV else None
        return CandidateScore(
            name,
            None if which is None else self._strengths[which],
            score(scores, "nats"),
            score(scores, "divergences"),
            None if name == MEAN else difference(scores, mean, "nats"),
            None if name == MEAN else difference(scores, mean, "divergences"),
        )

    def _fine_tune(self, number: int, alone: Sequence[RowScores], base: Scores) -> FineTune:
        mine, basis, pair = alone[number], base[number], self.pairs[number]
        return FineTune(
            self.names[number],
            pair.user_file,
            difference([mine], [basis], "nats"),
            float(basis.divergences.sum() / basis.tokens.sum()),
        )


def _is_current(folder: Path, state: str, text: Path, tokens: int) -> bool:
    """Whether a folder has the statistics of this model and text."""
    if not is_stored(str(folder)):
        return False
    try:
        stored = read_stored(str(folder))
    except (CheckpointError, FormatError):
        return False
    source = text_source(str(text), None, tokens, 0, "")
    return (stored.model.state, stored.text.sha256, stored.text.tokens) == (state, source.sha256, tokens)
