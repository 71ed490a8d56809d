"""The actions of the page, one method for each. Their results are put on the board."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weightsmith import (
    Busy,
    CannotResume,
    OutputExists,
    ParameterError,
    Preview,
    Progress,
    StoreError,
    WeightsmithError,
    demo_models,
    inspect,
    methods,
    preview,
)
from weightsmith._app.studio import draft, show
from weightsmith._app.studio.check import (
    NOTHING_WRITTEN,
    Checked,
    Mend,
    PageError,
    allowed,
    check,
    first_finding,
    model_allowed,
    said,
)
from weightsmith._app.studio.kept import KeptRuns, StudioRun
from weightsmith._app.studio.places import Places, reference
from weightsmith._app.studio.search import FEWEST, MOST, MergeSearch, can_search
from weightsmith._app.studio.tasks import MAX_BUDGET, MAX_NEW_TOKENS, MAX_SWEEP, MAX_TEXT, Tasks, available
from weightsmith._app.studio.work import PAGE_NAME, Board, Status, StudioWork, WorkCancelled, unfinished
from weightsmith.plugin import duration, install, size

_TICK_SECONDS = 0.2
_WRITE_SECONDS = 1.0
"""Until what the disk refused is tried again."""
_NO_PREVIEW = (
    "Choose a base and models to see here what the merge will do, before anything is written.",
    "The preview appears when the recipe is correct.",
)
_HISTORY = 200
"""Texts that `undo` can go back to."""


class Session:
    """The studio of a process: one recipe, one merge, one task, for all who have its page open.

    Every argument comes from a browser. Recipes are checked by `allowed`, single models by `model_allowed`, names of results by
    `Places.target`. `close` ends its threads.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.board = Board()
        self.kept = KeptRuns(places.out)
        self.work = StudioWork(self._interrupted())
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._back: deque[str] = deque(maxlen=_HISTORY)
        self._ahead: deque[str] = deque(maxlen=_HISTORY)
        self._facts: dict[str, Any] = {}
        self._closed = False
        self.tasks = Tasks(places, self.board, self.kept, self.add_run, self._stored)
        self._status = self.work.status
        about = {"id": secrets.token_hex(8), "out": reference(places.out), "hub": places.hub, "alone": places.alone}
        self.board.put("studio", about | limits())
        self._show_runs()
        self._publish()
        self.board.put("work", _shown_work(self._status))
        for work in (self._follow, self._watch, self._list_models, self._keep_writing):
            threading.Thread(target=work, name=f"weightsmith-studio-{work.__name__}", daemon=True).start()

    def close(self) -> None:
        """End the threads that follow the recipe. A merge that runs is stopped, and can be resumed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.tasks.stop()
        self.work.cancel()
        ended = self.work.wait(10).state not in ("running", "cancelled")  # those are for the next studio to resume
        with suppress(StoreError):
            self.kept.ended("merge") if ended else self.kept.flush()
        self.kept.close()

    # ---- the recipe

    @property
    def text(self) -> str:
        """The recipe."""
        return self.kept.text

    def edit(self, tab: str, number: int, changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Apply edits in order; see `draft.edited`. Returns the document as it is now.

        tab, number  the sender, and the number of its request: a request that is sent again is applied once
        """
        with self._changed:
            if number > self.kept.taken.get(tab, 0):
                text = self.text
                back, ahead = self._back.copy(), self._ahead.copy()
                for change in changes:
                    text = self._edited(text, change, back, ahead)
                if len(text) > draft.MAX_CHARACTERS * 2:
                    raise ParameterError(f"the recipe has more than {draft.MAX_CHARACTERS:,} characters", fix="shorten it")
                changed = text != self.text
                self._stored(lambda: self.kept.save(text, tab, number))
                self._back, self._ahead = back, ahead
                if changed:
                    self._publish()
                    self._changed.notify_all()
            return self.board.get("document")

    def _stored(self, store: Callable[[], None]) -> None:
        """Store something on disk. If that fails, it stays in memory, and the page says why until it is on the disk."""
        try:
            store()
        except Busy:  # the folder is another studio's, and nothing was changed
            raise
        except StoreError as error:
            self._unsaved(error)
        else:
            self.board.put("unsaved", "")

    def _unsaved(self, error: StoreError) -> None:
        self.board.put("unsaved", f"{error.finding.what} ({reference(self.kept.folder)})")

    def _keep_writing(self) -> None:
        """Write what the disk refused, as soon as it takes it, and what was removed."""
        while True:
            time.sleep(_WRITE_SECONDS)
            with self._lock:
                if self._closed:
                    return
                try:
                    self._stored(self.kept.flush)
                except Busy as error:
                    self._unsaved(error)

    def _edited(self, text: str, change: Mapping[str, Any], back: deque[str], ahead: deque[str]) -> str:
        """The text after one change. back, ahead: what undo and redo return to."""
        kind = change.get("kind")
        if kind in ("undo", "redo"):
            source, target = (back, ahead) if kind == "undo" else (ahead, back)
            if source:
                target.append(text)
                text = source.pop()
            return text
        new = draft.edited(text, change, lambda model, base: self.places.on_base([model], base)[0])
        if new != text:
            back.append(text)
            ahead.clear()
        return new

    def _publish(self) -> None:
        """Put the document on the board."""
        text = self.kept.text
        shown = draft.read(text) if text.strip() else draft.Draft()
        about = {"version": self.kept.version, "text": text, "draft": asdict(shown)}
        self.board.put("document", about | {"undo": len(self._back), "redo": len(self._ahead)})

    # ---- what follows from the recipe

    def _follow(self) -> None:
        """Check and preview the newest recipe, again and again."""
        done = -1
        while True:
            with self._changed:
                while self.kept.version == done and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                version, text = self.kept.version, self.text
            try:
                if self._check(version, text):
                    self._preview(version, text)
                else:
                    self._show_preview(version, show.empty(_NO_PREVIEW[bool(text.strip())]))
            except Exception as error:  # the page must go on, whatever a model holds
                if (self.board.get("notes") or {}).get("version") != version:
                    facts = {"version": version, "html": show.error(error), "marks": [], "good": False}
                    self.board.put("notes", facts | {"reason": "The recipe cannot be checked."})
                self._show_preview(version, show.error(error))
            done = version

    def _check(self, version: int, text: str) -> bool:
        """Show the problems of a recipe. Whether it has none."""
        checked = check(text, self.places) if text.strip() else Checked(())
        marks = [[note.line, note.level] for note in checked.notes if note.line and note.level != "open"]
        html = show.notes(checked) if text.strip() else ""
        facts: dict[str, Any] = {"version": version, "html": html, "marks": marks, "good": checked.plan is not None}
        facts["reason"] = checked.reason if text.strip() else "Choose a base and models."
        if checked.plan is not None:
            facts["costs"] = [
                ["size", size(checked.file_bytes)],
                ["memory", size(checked.memory_bytes)],
                *self._time(checked.plan.provenance.name, checked.file_bytes),
            ]
        self.board.put("notes", facts)
        return checked.plan is not None

    def _time(self, name: str, nbytes: int) -> list[list[str]]:
        """The estimated time of a merge, from the last one with the same method."""
        for run in reversed(self.kept.runs):
            if run.kind == "merge" and run.seconds and run.numbers.get("method") == name and (old := run.numbers.get("bytes")):
                return [["time", f"about {duration(run.seconds * nbytes / max(1, int(old)))}"]]
        return []

    def _preview(self, version: int, text: str) -> None:
        """Preview a correct recipe, until there is a newer one."""
        shown = self.board.get("preview") or {}
        if not shown.get("charts"):  # no picture of an earlier recipe stays meanwhile
            shown = {**shown, "html": show.empty("The preview appears here in a moment.")}
        self.board.put("preview", {**shown, "busy": version})
        began = time.monotonic()

        def progress(_now: Progress) -> None:
            if self.kept.version != version or self._closed:
                raise WorkCancelled

        try:
            result = preview(allowed(text, self.places), stream=True, progress=progress)
        except KeyboardInterrupt:
            return
        except WeightsmithError as error:
            self._show_preview(version, show.error(error))
            return
        self._show_preview(version, *show.preview(result), _survives(result))
        self.add_run("preview", result.method, text, time.monotonic() - began, show.preview_numbers(result))

    def _show_preview(
        self, version: int, html: str, charts: Sequence[Any] = (), survives: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.board.put("preview", {"version": version, "html": html, "charts": charts, "survives": dict(survives)})

    # ---- models

    def _list_models(self) -> None:
        """List the models, then what each is."""
        try:
            listed = self.places.models()
        except OSError:
            return
        self._show_models(listed)
        for i, model in enumerate(listed):
            if self._closed:
                return
            if model.ref not in self._facts:
                self._facts[model.ref] = self._fact(model.ref)
                if i % 8 == 7:
                    self._show_models(listed)
        self._show_models(listed)

    def _show_models(self, listed: Sequence[Any]) -> None:
        cards = [{"ref": model.ref, "adapter": model.adapter, **self._facts.get(model.ref, {})} for model in listed]
        self.board.put("models", cards)

    def _fact(self, name: str) -> dict[str, Any]:
        try:
            return self.card(name)
        except WeightsmithError as error:
            return {"problem": said(first_finding(error)).finding.what}

    def card(self, name: str) -> dict[str, Any]:
        """The summary of a model. Raises PlanError for a name that may not be read, and for a model that does not exist."""
        return show.card(inspect(model_allowed(name, self.places), progress=False))

    # ---- merging

    def start(self, version: int, name: str, *, overwrite: bool = False, again: bool = False) -> dict[str, Any]:
        """Begin the merge, and return how it begins, for the page.

        version  of the recipe that the page shows
        again    discard unfinished work of this name

        Raises CannotResume for a recipe that has been changed since, Busy, PlanError, ParameterError.
        """
        with self._lock:
            text = self.recipe(version)
            recipe = allowed(text, self.places)
            if (overwrite or again) and not self.places.alone:
                what = "a studio that others can reach replaces no result, and discards no unfinished work"
                raise ParameterError(what, where=name, fix="choose another name", state=NOTHING_WRITTEN)
            target = self.places.target(name.strip())
            if self.work.status.state != "running":  # noted first: a studio that is killed at once leaves word of it
                self._stored(lambda: self.kept.began("merge", target.name))
            return _shown_work(self.work.start(recipe, target, overwrite=overwrite is True, resume=again is not True))

    def recipe(self, version: int) -> str:
        """The recipe that the page shows. Raises CannotResume if it has been changed since, PageError if it is empty."""
        if version != self.kept.version:
            what = "the recipe was changed meanwhile, in another tab"
            raise CannotResume(what, fix="look at it, and press again", state=NOTHING_WRITTEN)
        if not self.text.strip():
            raise PageError("no model is chosen yet", Mend("models", "Choose models"))
        return self.text

    def fit(self, text: str, tokens: int | None) -> dict[str, Any]:
        """How many rows a text has for a search, with the tokenizer of the recipe's result. Raises as `Tasks.tune`."""
        return asdict(self.tasks.fit(self.recipe(self.kept.version), text, tokens))

    def find(self, version: int, name: str, texts: Mapping[str, str], *, overwrite: bool = False) -> None:
        """Find a good merge of the models that the page shows. Raises as `recipe` and `Tasks.find`."""
        self.tasks.find(MergeSearch.of_recipe(self.recipe(version), name, texts, overwrite=overwrite))

    def example(self) -> None:
        """Make the demo's models among the results, if they are not there, and a recipe of them. Raises StoreError."""
        recipe = make_example(self.places)
        with self._changed:
            self.edit("example", self.kept.taken.get("example", 0) + 1, [{"kind": "text", "base": self.text, "text": recipe}])
        threading.Thread(target=self._list_models, daemon=True).start()

    def _interrupted(self) -> Status:
        """The merge that ran when an earlier studio was killed."""
        try:
            out = self.places.target(self.kept.interrupted.get("merge", ""))
        except WeightsmithError:
            return Status()
        return Status("published" if self.kept.is_newer(out) else "interrupted", out=out)

    def about_name(self, name: str) -> dict[str, bool]:
        """Whether a result of this name exists, and whether a merge of this name was interrupted."""
        try:
            target = self.places.target(name.strip())
        except WeightsmithError:
            return {"valid": False, "exists": False, "unfinished": False}
        return {"valid": True, "exists": target.exists(), "unfinished": unfinished(target)}

    def _watch(self) -> None:
        """Show the progress of merges, and record finished ones as runs."""
        while True:
            time.sleep(_TICK_SECONDS)
            with self._lock:
                if self._closed:
                    return
                before, self._status = self._status, self.work.status
                if self._status is not before:
                    self._progressed(self._status)

    def _progressed(self, now: Status) -> None:
        self.board.put("work", _shown_work(now))
        try:
            if now.state == "done":
                self._ended(now)
            if now.state != "running":  # last: a studio that is killed before leaves word of it
                self._stored(lambda: self.kept.ended("merge"))
        except Busy as error:  # the next merge must be watched too
            self._unsaved(error)

    def _ended(self, status: Status) -> None:
        merged = status.merged
        if merged is None or status.out is None:
            return
        numbers = {"method": merged.plan.provenance.name, "bytes": str(sum(step.out.nbytes for step in merged.plan.steps))}
        if merged.distance:
            numbers["distance from the base"] = merged.distance[0].percent()
        page = status.out / PAGE_NAME
        try:
            html = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # somebody removed it
            html = ""
        self.add_run(
            "merge", status.out.name, merged.plan.recipe or self.text, merged.seconds, numbers, html, reference(status.out)
        )

    # ---- runs

    def add_run(
        self, kind: str, title: str, recipe: str, seconds: float, numbers: Mapping[str, str], page: str = "", model: str = ""
    ) -> int:
        """Record a run, and return its number. page: its report, as HTML; model: the path of its result."""
        with self._lock:
            number = self.kept.next_id()
            run = StudioRun(number, kind, time.time(), title, recipe, round(seconds, 3), dict(numbers), bool(page), model)
            self._stored(lambda: self.kept.add(run, page))
            self._show_runs()
        if model:
            self._facts.pop(model, None)  # it may have been replaced
            threading.Thread(target=self._list_models, daemon=True).start()
        return number

    def _show_runs(self) -> None:
        runs = self.kept.runs
        self.board.put("runs", [asdict(run) | {"command": _command(run)} for run in runs[-100:]])

    def compare_runs(self, first: int, second: int) -> str:
        """Two runs side by side, as HTML."""
        known = {run.id: run for run in self.kept.runs}
        if first not in known or second not in known:
            raise ParameterError("this run is gone", fix="choose another")
        return show.two_runs(known[first], known[second])


def _survives(result: Preview) -> dict[str, list[float | None]]:
    """For each model of the recipe, the share that survives in each layer."""
    layers = [layer for layer in result.layers if layer.name.rpartition(".")[2].isdigit()]

    def share(layer: Any, i: int) -> float | None:
        kept = layer.models[i]
        return None if kept is None or kept.survives != kept.survives else round(min(1.0, max(0.0, kept.survives)), 4)

    return {name: [share(layer, i) for layer in layers] for i, name in enumerate(result.names)}


def _command(run: StudioRun) -> str:
    """The equivalent command. The recipe is saved as recipe.yml."""
    if run.kind in ("merge", "auto"):
        return f"weightsmith merge recipe.yml {shlex.quote(run.model)}"
    if run.kind == "look":
        base, *others = run.title.split(", ")
        if len(others) > 1:
            return f"weightsmith diff --base {shlex.join([base, *others])}"
        return f"weightsmith {'diff' if others else 'inspect --stats'} {shlex.join([base, *others])}"
    return "weightsmith preview recipe.yml"


def can_tune() -> bool:
    """Whether what a search for parameters needs is installed."""
    return available() and find_spec("cmaes") is not None


def limits() -> dict[str, Any]:
    """What can be done here, and how much of it: the page says so before anything is sent."""
    return {
        "missing": {
            "try": "" if available() else f"Trying needs torch and transformers: {install('moe')}",
            "find": "" if can_search() else f"Finding a merge needs torch: {install('calibration')}",
            "tune": "" if can_tune() else f"Tuning needs torch, transformers and cmaes: {install('tune,moe')}",
        },
        "fewest": FEWEST,
        "most": MOST,
        "max_new_tokens": MAX_NEW_TOKENS,
        "max_characters": MAX_TEXT,
        "max_sweep": MAX_SWEEP,
        "max_budget": MAX_BUDGET,
    }


def _shown_work(status: Status) -> dict[str, Any]:
    """A merge, for the page."""
    share = status.reading.share if status.reading is not None else 0.0
    name = status.out.name if status.out is not None else ""
    shown = {"state": status.state, "number": status.number, "name": name, "share": round(share, 3)}
    return {**shown, "html": show.status(status), "problem": show.error(status.problem) if status.problem else ""}


def listed_methods() -> list[dict[str, str]]:
    """The merge methods, for the picker."""
    return [
        {
            "name": method.name,
            "title": show.plain(method.title),
            "family": method.family,
            "use": method.use,
            "html": show.about(method),
        }
        for method in methods()
    ]


# ---- Models to try the studio with: those of `weightsmith demo`, made among the results.

_EXAMPLE = "demo"
"""In the folder of the results."""
_EXAMPLE_PART = ".demo.part"
_EXAMPLE_MODELS = "base", "french", "german"


def make_example(places: Places) -> str:
    """Make the models unless they are there; a recipe of them. Raises StoreError, OutputExists for a folder of another kind."""
    folder = places.out / _EXAMPLE
    if not os.path.lexists(folder):
        try:
            _make_example(folder)
        except OSError as error:
            what = f"the example cannot be written: {error.strerror or error}"
            raise StoreError(what, where=reference(folder), fix="free space, or make the folder writable") from error
    if not all((folder / name / "config.json").is_file() for name in _EXAMPLE_MODELS):
        raise OutputExists("there is another folder of this name", where=reference(folder), fix="rename it")
    base, *others = (reference(folder / name) for name in _EXAMPLE_MODELS)
    return draft.begin("combine", base, others)


def _make_example(folder: Path) -> None:
    """Make the models, all or none."""
    part = folder.with_name(_EXAMPLE_PART)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        demo_models(part)
        (part / "recipe.yml").unlink()  # its paths are those of the folder that it was made in
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
