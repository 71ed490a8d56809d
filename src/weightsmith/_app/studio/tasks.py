"""Long-running tasks that write no model: merges tried in memory with transformers, sweeps, searches, comparisons.

One at a time, in a thread.
"""

from __future__ import annotations

import gc
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weightsmith import (
    Busy,
    Judge,
    OutputExists,
    ParameterError,
    Progress,
    Unsupported,
    WeightsmithError,
    auto,
    diff,
    inspect,
    preview,
    tune,
)
from weightsmith._app.studio import draft, edits, show
from weightsmith._app.studio import search as merge_search
from weightsmith._app.studio.check import (
    NOTHING_WRITTEN,
    TEXT_FILE,
    TEXT_FOLDER,
    Mend,
    PageError,
    allowed,
    first_finding,
    model_allowed,
    said,
)
from weightsmith._app.studio.kept import KeptRuns
from weightsmith._app.studio.places import Places, reference
from weightsmith._app.studio.work import Board, WorkCancelled
from weightsmith.plugin import Fit, Meter, Reading, RecipeTexts, count, first_line, install

MAX_SWEEP = 9
"""Values of a sweep."""
MAX_BUDGET = 1000
"""Candidates of a search."""

MERGE = "the merge"
"""The name of a recipe's result."""
MAX_TEXT = 100_000
"""The most characters of a text or a prompt."""
MAX_NEW_TOKENS = 256
MAX_MODELS = 12
ROWS = 8
"""Rows of the text to use, of 384 tokens each."""
_BUTTONS: Mapping[str, str] = {"auto": "Find a good merge", "try": "Try", "sweep": "Sweep", "tune": "Tune", "look": "Compare"}
"""What begins each kind of task."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The prompt to continue greedily, by `new_tokens` tokens, and the text for the perplexity. Either may be ""."""

    prompt: str = ""
    text: str = ""
    new_tokens: int = 48

    def check(self, models: int) -> None:
        """Raise Unsupported for too much of anything, or without transformers."""
        if not available():
            raise Unsupported("trying needs torch and transformers", fix=f"run {install('moe')}")
        long = max(len(self.prompt), len(self.text)) > MAX_TEXT
        if models > MAX_MODELS or long or not 0 < self.new_tokens <= MAX_NEW_TOKENS:
            what = f"at most {MAX_MODELS} models, {MAX_TEXT:,} characters and {MAX_NEW_TOKENS} new tokens"
            raise Unsupported(f"too much to compare: {what}", fix="ask for less")


def available() -> bool:
    """Whether torch and transformers are installed."""
    return find_spec("torch") is not None and find_spec("transformers") is not None


def compare(models: Sequence[str], places: Places, asked: Asked) -> Iterator[show.Sample]:
    """What each model does with a prompt and a text; one model in memory at a time, in float32.

    models  as a recipe names them. Raises Unsupported; see `Asked.check`.
    """
    asked.check(len(models))
    for name in models:
        yield _sample(name, lambda name=name: Judge.of_model(model_allowed(name, places)), asked)  # type: ignore[misc]


def tried(recipe: str, places: Places, asked: Asked) -> show.Sample:
    """What the result of a recipe does. It is merged in memory, and has the bytes of a written merge."""
    asked.check(1)
    return _sample(MERGE, lambda: Judge.of_recipe(allowed(recipe, places)), asked)


def _sample(name: str, load: Callable[[], Judge], asked: Asked) -> show.Sample:
    try:
        judge = load()
        text = judge.continuation(asked.prompt, asked.new_tokens) if asked.prompt.strip() else ""
        sample = show.Sample(name, text, judge.perplexity(asked.text, ROWS) if asked.text.strip() else None)
        del judge
    except WeightsmithError as error:
        sample = show.Sample(name, problem=str(said(first_finding(error)).finding))
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:  # what transformers raises for such models
        sample = show.Sample(name, problem=f"transformers cannot run it: {first_line(error)}")
    gc.collect()
    return sample


class Tasks:
    """The running task. Its progress is on the board.

    add     records its result: `Session.add_run`
    stored  stores something on disk: `Session._stored`

    Recipes come from the session. All other arguments come from a browser, and are checked here.
    """

    def __init__(
        self,
        places: Places,
        board: Board,
        kept: KeptRuns,
        add: Callable[..., int],
        stored: Callable[[Callable[[], None]], None],
    ) -> None:
        self.places = places
        self.board = board
        self.kept = kept
        self._add = add
        self._stored = stored
        self._texts: tuple[str, RecipeTexts] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.board.put("task", {"running": False})
        for kind, title in kept.interrupted.items():
            if kind in _BUTTONS:
                what = f"Interrupted: {title}. The studio ended before this was done."
                self.show(kind, "", show.hint(f"{what} Press {_BUTTONS[kind]} to begin again."), running=False)

    def stop(self) -> None:
        """Stop the task after the current model."""
        self._stop.set()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until no task runs, or for so long."""
        if self._thread is not None:
            self._thread.join(seconds)

    def ask(self, recipe: str, models: Sequence[str], prompt: str, text: str, new_tokens: int) -> None:
        """Run the merge, in memory, and models to compare it with. Raises Unsupported, PlanError, Busy."""
        recipe = allowed(recipe, self.places)
        asked = Asked(prompt, text, new_tokens)
        asked.check(len(models) + 1)
        if not prompt.strip() and not text.strip():
            raise PageError("there is nothing to try it on", Mend("prompt", "Write a prompt"))

        def work() -> None:
            began, samples = time.monotonic(), list[show.Sample]()
            steps: list[tuple[str, Callable[[], show.Sample]]] = [
                (MERGE, lambda: tried(recipe, self.places, asked)),
                *((name, lambda name=name: next(compare([name], self.places, asked))) for name in models),
            ]
            for name, step in steps:
                self.show("try", f"running {name}", show.samples(samples, prompt))
                if self._stop.is_set():
                    break
                samples.append(step())
            html = show.samples(samples, prompt)
            numbers = show.sample_numbers(samples)
            if samples:
                self._add("try", draft.read(recipe).method, recipe, time.monotonic() - began, numbers)
            self.show("try", "", html, running=False)

        self._begin("try", work, MERGE)

    def sweep(self, recipe: str, path: Sequence[Any], model: str, values: Sequence[float], prompt: str, text: str) -> None:
        """Preview the recipe with several values of one parameter, and run the merges if there is a prompt or a text.

        Raises as `ask`, ParameterError.
        """
        allowed(recipe, self.places)
        if not 0 < len(values) <= MAX_SWEEP or not all(map(math.isfinite, values)):
            raise ParameterError(f"a sweep has from 1 to {MAX_SWEEP} numbers", fix="write others")
        texts = []
        for value in values:
            change = {"kind": "set", "path": list(path), "model": model, "value": value}
            texts.append(draft.edited(recipe, change))
            if draft.read(texts[-1]).held or draft.control_at(recipe, list(path), model) is None:
                raise ParameterError("this parameter cannot be swept", where=str(path), fix="choose another parameter")
        asked = Asked(prompt, text, 32)
        runs = bool(prompt.strip() or text.strip())
        if runs:
            asked.check(1)
        name = f"{path[-1]} of {model}" if model else str(path[-1])

        def work() -> None:
            began, rows = time.monotonic(), list[show.Swept]()
            for value, text_of in zip(values, texts, strict=True):
                self.show("sweep", f"{name} = {value:g}", show.sweep(name, rows, prompt))
                if self._stop.is_set():
                    break
                result = preview(allowed(text_of, self.places), stream=True, progress=self.stop_if_asked)
                sample = tried(text_of, self.places, asked) if runs else None
                rows.append(show.Swept(value, result, sample))
            if rows:
                numbers = {"values": ", ".join(f"{row.value:g}" for row in rows)}
                self._add("sweep", name, recipe, time.monotonic() - began, numbers)
            self.show("sweep", "", show.sweep(name, rows, prompt), running=False)

        self._begin("sweep", work, name)

    def fit(self, recipe: str, text: str, tokens: int | None) -> Fit:
        """Whether a text is long enough to be tuned on. tokens: in each row; None: 512, or the model's maximum.

        Raises ParameterError, PlanError: the recipe, or a model without a tokenizer.
        """
        if not 0 < len(text) <= MAX_TEXT:
            raise ParameterError(f"a text has up to {MAX_TEXT:,} characters", fix="write another")
        texts = self._texts_of(allowed(recipe, self.places))
        if tokens is not None and not 2 <= tokens <= texts.positions:
            what = f"rows have from 2 to {texts.positions:,} tokens, not {tokens:,}"
            raise PageError(what, Mend("tokens", f"Use rows of {texts.tokens} tokens", str(texts.tokens)))
        with tempfile.TemporaryDirectory(prefix=TEXT_FOLDER) as folder:
            path = Path(folder) / TEXT_FILE
            path.write_text(text, encoding="utf-8")
            return texts.fit(path, tokens)

    def _texts_of(self, recipe: str) -> RecipeTexts:
        """What cuts texts for a recipe's result; kept for the next text."""
        if self._texts is None or self._texts[0] != recipe:
            self._texts = recipe, RecipeTexts(recipe)
        return self._texts[1]

    def tune(
        self,
        recipe: str,
        ranges: Sequence[tuple[list[Any], str, float, float]],
        text: str,
        budget: int,
        tokens: int | None = None,
    ) -> None:
        """Find the values of some parameters with which the merge predicts a text best; see `weightsmith.tune`.

        ranges  path, model, minimum and maximum of each
        tokens  in each row of the text

        Raises as `ask`; ParameterError, for a text that is too short too.
        """
        allowed(recipe, self.places)
        if not ranges or not text.strip() or not 1 < budget <= MAX_BUDGET or len(text) > MAX_TEXT:
            what = f"a search takes one parameter or more, a text, and from 2 to {MAX_BUDGET:,} candidates"
            raise PageError(what, Mend("text", "Write a text"), fix="choose parameters, and write a text")
        asked, names = recipe, list[str]()
        for path, model, low, high in ranges:
            control = draft.control_at(recipe, path, model)
            if control is None or control.kind not in ("float", "int") or not low < high:
                raise ParameterError(
                    "this parameter cannot be tuned", where=f"{path}, {low:g} to {high:g}", fix="write a range"
                )
            asked = edits.put(asked, control.path, {"tune": [low, high]})
            names.append(f"{control.name} of {model}" if model else control.name)

        too_short = _too_short(self.fit(recipe, text, tokens))
        if too_short is not None:
            raise too_short

        def work() -> None:
            began = time.monotonic()
            with self.kept.scratch() as folder:
                (folder / TEXT_FILE).write_text(text, encoding="utf-8")
                shown = _Trials(self, names)
                options: dict[str, Any] = {"budget": budget, "progress": shown, "on_trial": shown.add}
                tuning = tune(asked, folder / "tuned.yml", text=folder / TEXT_FILE, tokens=tokens, **options)
                page = tuning.report()
            numbers = {f"perplexity of the {name}": f"{score.perplexity:.4g}" for name, score in tuning.totals.items()}
            number = self._add("tune", ", ".join(names), tuning.recipe, time.monotonic() - began, numbers, page.to_html())
            html = show.verdict(page) + show.trials(names, shown.rows)
            self.show("tune", "", html, running=False, report=number)

        self._begin("tune", work, ", ".join(names))

    def find(self, search: merge_search.MergeSearch) -> None:
        """Find a good merge and write it; see `weightsmith.auto`. Raises as `MergeSearch.check`, Busy."""
        out = search.check(self.places, MAX_TEXT)
        if out.exists() and not search.overwrite:
            fix = "choose another name, or replace it: --overwrite"
            raise OutputExists("a result of this name exists", where=reference(out), fix=fix, state=NOTHING_WRITTEN)
        title = ", ".join((search.base, *search.fine_tunes))

        def work() -> None:
            began = time.monotonic()
            shown = merge_search.Stages(search, lambda doing, html: self.show("auto", doing, html), self.stop_if_asked)
            out.parent.mkdir(parents=True, exist_ok=True)
            with self.kept.scratch() as folder:
                text = search.text_files(folder)
                models = search.base, search.fine_tunes
                result = auto(*models, out, text=text, progress=shown, overwrite=search.overwrite)
            page = result.report()
            numbers = merge_search.numbers(result)
            spent = time.monotonic() - began
            run = self._add("auto", title, result.recipe, spent, numbers, page.to_html(), reference(out))
            html = show.search_result(merge_search.page_words(page), reference(out))
            self.show("auto", "", html, running=False, report=run)

        self._begin("auto", work, f"a merge of {', '.join(search.fine_tunes)}")

    def look(self, recipe: str, models: Sequence[str]) -> None:
        """Report on models: a summary of one, the differences of two, or the deltas of several from the first."""
        every = [model_allowed(name, self.places) for name in models]
        if not every:
            raise ParameterError("no model is chosen", fix="choose models on the left")

        def work() -> None:
            began = time.monotonic()
            self.show("look", f"reading {', '.join(every)}", "")
            if len(every) > 2:
                report = diff(*every[1:], base=every[0], progress=self.stop_if_asked).report()
            elif len(every) == 2:
                report = diff(every[0], every[1], progress=self.stop_if_asked).report()
            else:
                report = inspect(every[0], stats=True, progress=False).report()
            run = self._add("look", ", ".join(every), recipe, time.monotonic() - began, dict(report.numbers), report.to_html())
            self.show("look", "", show.verdict(report), running=False, report=run)
            if len(every) == 2 and report.summary:
                verdicts = self.board.get("verdicts") or {}
                self.board.put("verdicts", {**verdicts, every[0]: {**verdicts.get(every[0], {}), every[1]: report.summary[0]}})

        self._begin("look", work, ", ".join(every))

    def stop_if_asked(self, _now: Progress | None = None) -> None:
        """Raise Cancelled if the task is to stop."""
        if self._stop.is_set():
            raise WorkCancelled

    def _begin(self, kind: str, work: Callable[[], None], title: str) -> None:
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise Busy("another task is running", fix="wait until it is done, or stop it")
            self._stored(lambda: self.kept.began(kind, title))
            self._stop.clear()
            self.show(kind, "starting", "")
            self._thread = threading.Thread(target=self._run, args=(kind, work), name="weightsmith-studio-task", daemon=True)
            self._thread.start()

    def _run(self, kind: str, work: Callable[[], None]) -> None:
        try:
            work()
        except KeyboardInterrupt:
            self.show(kind, "", show.hint("Stopped."), running=False)
        except Exception as error:
            self.show(kind, "", show.error(error), running=False)
        with suppress(Busy):
            self._stored(lambda: self.kept.ended(kind))

    def show(self, kind: str, doing: str, html: str, *, running: bool = True, report: int = 0) -> None:
        """Show the task's progress."""
        self.board.put("task", {"kind": kind, "running": running, "doing": doing, "html": html, "report": report})


def _too_short(fit: Fit) -> PageError | None:
    """Why a text cannot be tuned on; None if it can."""
    if fit.enough:
        return None
    what = f"the text has {count(fit.rows, 'row')} of {fit.tokens:,} tokens, and {fit.needed} are needed"
    if not fit.shorter:
        return PageError(what, Mend("text", "Write more"), fix="write a longer text")
    label = f"Use rows of {fit.shorter} tokens"
    return PageError(what, Mend("tokens", label, str(fit.shorter)), fix="write a longer text, or use shorter rows")


class _Trials(Meter):
    """Shows the trials of a search as they come, and stops it when asked to.

    rows  number, values and loss of each; None: it was not scored on all rows
    """

    def __init__(self, tasks: Tasks, names: Sequence[str]) -> None:
        self._tasks = tasks
        self._names = names
        self.rows: list[tuple[int, Sequence[Any], float | None]] = []

    def add(self, trial: Any, loss: float | None) -> None:
        """Take a trial. loss: as the report has it."""
        self.rows.append((trial.number, trial.values, loss))

    def show(self, reading: Reading) -> None:
        """Show the trials so far."""
        self.say(f"{reading.detail} ({reading.total:,} in all)")

    def say(self, text: str) -> None:
        """Show the trials so far. Called about ten times a second."""
        self._tasks.stop_if_asked()
        self._tasks.show("tune", text, show.trials(self._names, self.rows))
