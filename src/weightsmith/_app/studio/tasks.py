"""Long-running tasks that write no model: merges tried in memory, sweeps, searches, comparisons. One at a time, in a thread."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsmith._app.studio import compare, draft, edits, show
from weightsmith._app.studio.board import Board
from weightsmith._app.studio.check import allowed, model_allowed
from weightsmith._app.studio.kept import Kept
from weightsmith._app.studio.places import Places
from weightsmith._app.studio.work import Cancelled
from weightsmith._base.errors import Busy, ParameterError, WeightsmithError, first_line, report
from weightsmith._base.pages import to_html
from weightsmith._base.text import count
from weightsmith._execution.progress import Meter, Reading
from weightsmith._reports.look.diff import diff
from weightsmith._reports.look.inspect import inspect
from weightsmith._reports.look.pages import comparison_page, difference_page, inspection_page
from weightsmith._reports.look.preview import preview
from weightsmith._reports.tuning.report import tuning_page
from weightsmith._reports.tuning.result import total
from weightsmith._reports.tuning.tune import tune

if TYPE_CHECKING:
    from weightsmith._engine.local import Progress

MAX_SWEEP = 9
"""Values of a sweep."""
MAX_BUDGET = 1000
"""Candidates of a search."""


class Tasks:
    """The running task. Its progress is on the board. `add` records its result: `Session.add_run`.

    Recipes come from the session. All other arguments come from a browser, and are checked here.
    """

    def __init__(self, places: Places, board: Board, kept: Kept, add: Callable[..., int]) -> None:
        self.places = places
        self.board = board
        self.kept = kept
        self._add = add
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.board.put("task", {"running": False})

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
        asked = compare.Asked(prompt, text, new_tokens)
        asked.check(len(models) + 1)
        if not prompt.strip() and not text.strip():
            raise ParameterError("there is nothing to try it on", fix="write a prompt, or a text")

        def work() -> None:
            began, found = time.monotonic(), list[compare.Sample]()
            steps: list[tuple[str, Callable[[], compare.Sample]]] = [
                (compare.MERGE, lambda: compare.tried(recipe, self.places, asked)),
                *((name, lambda name=name: next(compare.compare([name], self.places, asked))) for name in models),
            ]
            for name, step in steps:
                self.show("try", f"running {name}", show.samples(found, prompt))
                if self._stop.is_set():
                    break
                found.append(step())
            html = show.samples(found, prompt)
            numbers = show.sample_numbers(found)
            if found:
                self._add("try", draft.read(recipe).method, recipe, time.monotonic() - began, numbers)
            self.show("try", "", html, running=False)

        self._begin("try", work)

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
        asked = compare.Asked(prompt, text, 32)
        runs = bool(prompt.strip() or text.strip())
        if runs:
            asked.check(1)
        name = f"{path[-1]} of {model}" if model else str(path[-1])

        def work() -> None:
            began, rows = time.monotonic(), list[show.Swept]()
            for value, each in zip(values, texts, strict=True):
                self.show("sweep", f"{name} = {value:g}", show.sweep(name, rows, prompt))
                if self._stop.is_set():
                    break
                found = preview(allowed(each, self.places), stream=True, progress=self.stop_if_asked)
                sample = compare.tried(each, self.places, asked) if runs else None
                rows.append(show.Swept(value, found, sample))
            if rows:
                numbers = {"values": ", ".join(f"{row.value:g}" for row in rows)}
                self._add("sweep", name, recipe, time.monotonic() - began, numbers)
            self.show("sweep", "", show.sweep(name, rows, prompt), running=False)

        self._begin("sweep", work)

    def tune(self, recipe: str, ranges: Sequence[tuple[list[Any], str, float, float]], text: str, budget: int) -> None:
        """Find the values of some parameters with which the merge predicts a text best; see `weightsmith.tune`.

        ranges  path, model, minimum and maximum of each. Raises as `ask`, ParameterError
        """
        allowed(recipe, self.places)
        if not ranges or not text.strip() or not 1 < budget <= MAX_BUDGET or len(text) > compare.MAX_CHARACTERS:
            what = f"a search takes one parameter or more, a text, and from 2 to {MAX_BUDGET:,} candidates"
            raise ParameterError(what, fix="choose parameters, and write the text in Try")
        asked, names = recipe, list[str]()
        for path, model, low, high in ranges:
            found = draft.control_at(recipe, path, model)
            if found is None or found.kind not in ("float", "int") or not low < high:
                raise ParameterError(
                    "this parameter cannot be tuned", where=f"{path}, {low:g} to {high:g}", fix="write a range"
                )
            asked = edits.put(asked, found.path, {"tune": [low, high]})
            names.append(f"{found.name} of {model}" if model else found.name)

        def work() -> None:
            began = time.monotonic()
            with self.kept.scratch() as folder:
                (folder / "text.txt").write_text(text, encoding="utf-8")
                out = folder / "tuned.yml"
                shown = _Trials(self, out.with_suffix(".trials.jsonl"), names)
                found = tune(asked, out, text=folder / "text.txt", budget=budget, progress=shown)
                page = tuning_page(found)
            perplexities = {name: f"{total(scores).perplexity:.4g}" for name, scores in found.judged.items()}
            numbers = {f"perplexity of the {name}": value for name, value in perplexities.items()}
            number = self._add("tune", ", ".join(names), found.recipe, time.monotonic() - began, numbers, to_html(page))
            html = show.verdict(page) + show.trials(names, [*shown.rows()])
            self.show("tune", "", html, running=False, report=number)

        self._begin("tune", work)

    def look(self, recipe: str, models: Sequence[str]) -> None:
        """Report on models: a summary of one, the differences of two, or the deltas of several from the first."""
        every = [model_allowed(name, self.places) for name in models]
        if not every:
            raise ParameterError("no model is chosen", fix="choose models on the left")

        def work() -> None:
            began = time.monotonic()
            self.show("look", f"reading {', '.join(every)}", "")
            if len(every) > 2:
                found = comparison_page(diff(*every[1:], base=every[0], progress=self.stop_if_asked))
            elif len(every) == 2:
                found = difference_page(diff(every[0], every[1], progress=self.stop_if_asked))
            else:
                found = inspection_page(inspect(every[0], stats=True, progress=False))
            run = self._add("look", ", ".join(every), recipe, time.monotonic() - began, dict(found.numbers), to_html(found))
            self.show("look", "", show.verdict(found), running=False, report=run)
            if len(every) == 2 and found.summary:
                verdicts = self.board.get("verdicts") or {}
                self.board.put("verdicts", {**verdicts, every[0]: {**verdicts.get(every[0], {}), every[1]: found.summary[0]}})

        self._begin("look", work)

    def stop_if_asked(self, _now: Progress | None = None) -> None:
        """Raise Cancelled if the task is to stop."""
        if self._stop.is_set():
            raise Cancelled

    def _begin(self, kind: str, work: Callable[[], None]) -> None:
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise Busy("another task is running", fix="wait until it is done, or stop it")
            self._stop.clear()
            self.show(kind, "starting", "")
            self._thread = threading.Thread(target=self._run, args=(kind, work), name="weightsmith-studio-task", daemon=True)
            self._thread.start()

    def _run(self, kind: str, work: Callable[[], None]) -> None:
        try:
            work()
        except KeyboardInterrupt:
            self.show(kind, "", show.hint("Stopped."), running=False)
        except WeightsmithError as error:
            self.show(kind, "", show.problem(report(error)), running=False)
        except Exception as error:
            self.show(kind, "", show.problem(f"{type(error).__name__}: {first_line(error)}"), running=False)

    def show(self, kind: str, doing: str, html: str, *, running: bool = True, report: int = 0) -> None:
        """Show the task's progress."""
        self.board.put("task", {"kind": kind, "running": running, "doing": doing, "html": html, "report": report})


class _Trials(Meter):
    """Shows the trials of a search as they come, and stops it when asked to."""

    def __init__(self, tasks: Tasks, journal: Path, names: Sequence[str]) -> None:
        self._tasks = tasks
        self._journal = journal
        self._names = names
        self._found: list[tuple[int, list[Any], float | None]] = []
        self._read = 0

    def rows(self) -> Sequence[tuple[int, list[Any], float | None]]:
        """Number, values and loss of each trial; None: it was not scored on all rows."""
        return self._found

    def show(self, reading: Reading) -> None:
        """Show the trials so far."""
        self.say(reading.label)

    def say(self, text: str) -> None:
        """Show the trials so far. Called about ten times a second."""
        self._tasks.stop_if_asked()
        self._take()
        self._tasks.show("tune", f"{text}, {count(len(self._found), 'trial')}", show.trials(self._names, self._found))

    def _take(self) -> None:
        """Read the new lines of the journal. The last one may be incomplete, and is left for later."""
        try:
            with self._journal.open("rb") as file:
                file.seek(self._read)
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return
        for line in lines:
            if not line.endswith(b"\n"):
                return
            self._read += len(line)
            values = json.loads(line)
            if "trial" in values:
                nats = [each for own in values.get("nats", []) for each in own]
                loss = sum(nats) / len(nats) if nats and None not in nats else None
                self._found.append((values["trial"], values["values"], loss))
