"""The actions of the page, one method for each. Their results are put on the board."""

from __future__ import annotations

import secrets
import shlex
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from weightsmith import _methods as methods
from weightsmith._app.studio import compare, draft, show
from weightsmith._app.studio.board import Board
from weightsmith._app.studio.check import Checked, allowed, check, first_finding, model_allowed
from weightsmith._app.studio.kept import Kept, Run
from weightsmith._app.studio.places import Places, reference
from weightsmith._app.studio.tasks import Tasks
from weightsmith._app.studio.work import Cancelled, Status, Work, unfinished
from weightsmith._base.errors import (
    NOTHING_WRITTEN,
    Busy,
    CannotResume,
    ParameterError,
    StoreError,
    WeightsmithError,
    report,
)
from weightsmith._base.text import duration, size
from weightsmith._execution.page import PAGE_NAME
from weightsmith._reports.look.inspect import inspect
from weightsmith._reports.look.preview import Preview, preview

if TYPE_CHECKING:
    from weightsmith._engine.local import Progress

_TICK_SECONDS = 0.2
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
        self.work = Work()
        self.kept = Kept(places.out)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._back: deque[str] = deque(maxlen=_HISTORY)
        self._ahead: deque[str] = deque(maxlen=_HISTORY)
        self._facts: dict[str, Any] = {}
        self._closed = False
        self.tasks = Tasks(places, self.board, self.kept, self.add_run)
        self._status = Status()
        about = {"id": secrets.token_hex(8), "out": reference(places.out), "hub": places.hub, "alone": places.alone}
        self.board.put("studio", about | {"can_run": compare.available(), "max_new_tokens": compare.MAX_NEW_TOKENS})
        self._show_runs()
        self._publish()
        self.board.put("work", _shown_work(self._status))
        for work in (self._follow, self._watch, self._list_models):
            threading.Thread(target=work, name=f"weightsmith-studio-{work.__name__}", daemon=True).start()

    def close(self) -> None:
        """End the threads that follow the recipe. A merge that runs is stopped, and can be resumed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.tasks.stop()
        self.work.cancel()
        self.work.wait(10)
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
                self._save(text, tab, number)
                self._back, self._ahead = back, ahead
                if changed:
                    self._publish()
                    self._changed.notify_all()
            found: dict[str, Any] = self.board.get("document")
            return found

    def _save(self, text: str, tab: str, number: int) -> None:
        """Store the recipe on disk. If that fails, keep it in memory and show why."""
        try:
            self.kept.save(text, tab, number)
        except Busy:  # the folder is another studio's, and nothing was changed
            raise
        except StoreError as error:
            self.board.put("unsaved", show.problem(report(error)))
        else:
            self.board.put("unsaved", "")

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
        found = draft.read(text) if text.strip() else draft.Draft()
        about = {"version": self.kept.version, "text": text, "draft": asdict(found)}
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
                    hint = show.hint("The preview appears when the recipe is correct.") if text.strip() else ""
                    self._show_preview(version, hint)
            except Exception as error:  # the page must go on, whatever a model holds
                self._show_preview(version, show.problem(f"{type(error).__name__}: {error}"))
            done = version

    def _check(self, version: int, text: str) -> bool:
        """Show the problems of a recipe. Whether it has none."""
        found = check(text, self.places) if text.strip() else Checked(())
        marks = [[note.line, note.level] for note in found.notes if note.line]
        html = show.notes(found) if text.strip() else ""
        facts: dict[str, Any] = {"version": version, "html": html, "marks": marks, "good": found.plan is not None}
        facts["errors"] = sum(note.level == "error" for note in found.notes)
        if found.plan is not None:
            facts["costs"] = [
                ["size", size(found.file_bytes)],
                ["memory", size(found.memory_bytes)],
                *self._time(found.plan.made.name, found.file_bytes),
            ]
        self.board.put("notes", facts)
        return found.plan is not None

    def _time(self, name: str, nbytes: int) -> list[list[str]]:
        """The estimated time of a merge, from the last one with the same method."""
        for run in reversed(self.kept.runs):
            if run.kind == "merge" and run.seconds and run.numbers.get("method") == name and (old := run.numbers.get("bytes")):
                return [["time", f"about {duration(run.seconds * nbytes / max(1, int(old)))}"]]
        return []

    def _preview(self, version: int, text: str) -> None:
        """Preview a correct recipe, until there is a newer one."""
        self.board.put("preview", {**(self.board.get("preview") or {}), "busy": version})
        began = time.monotonic()

        def progress(_now: Progress) -> None:
            if self.kept.version != version or self._closed:
                raise Cancelled

        try:
            found = preview(allowed(text, self.places), stream=True, progress=progress)
        except KeyboardInterrupt:
            return
        except WeightsmithError as error:
            self._show_preview(version, show.problem(report(error)))
            return
        self._show_preview(version, *show.preview(found), _survives(found))
        self.add_run("preview", found.method, text, time.monotonic() - began, show.preview_numbers(found))

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
        for i, found in enumerate(listed):
            if self._closed:
                return
            if found.ref not in self._facts:
                self._facts[found.ref] = self._fact(found.ref)
                if i % 8 == 7:
                    self._show_models(listed)
        self._show_models(listed)

    def _show_models(self, listed: Sequence[Any]) -> None:
        cards = [{"ref": found.ref, "adapter": found.adapter, **self._facts.get(found.ref, {})} for found in listed]
        self.board.put("models", cards)

    def _fact(self, name: str) -> dict[str, Any]:
        try:
            return self.card(name)
        except WeightsmithError as error:
            return {"problem": first_finding(error).what}

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
            return _shown_work(self.work.start(recipe, target, overwrite=overwrite is True, resume=again is not True))

    def recipe(self, version: int) -> str:
        """The recipe that the page shows. Raises CannotResume if it has been changed since."""
        if version != self.kept.version:
            what = "the recipe was changed meanwhile, in another tab"
            raise CannotResume(what, fix="look at it, and press again", state=NOTHING_WRITTEN)
        return self.text

    def about_name(self, name: str) -> dict[str, bool]:
        """Whether a result of this name exists, and whether a merge of this name was interrupted."""
        try:
            target = self.places.target(name.strip())
        except WeightsmithError:
            return {"valid": False, "exists": False, "unfinished": False}
        return {"valid": True, "exists": target.exists(), "unfinished": unfinished(target)}

    def _watch(self) -> None:
        """Show the progress of merges, and record finished ones as runs."""
        while not self._closed:
            time.sleep(_TICK_SECONDS)
            status = self.work.status
            if status is not self._status:
                self._status = status
                self.board.put("work", _shown_work(status))
                if status.state == "done":  # a fast merge may never be seen while it runs
                    try:
                        self._ended(status)
                    except (OSError, WeightsmithError) as error:  # the next merge must be watched too
                        words = report(error) if isinstance(error, WeightsmithError) else str(error)
                        self.board.put("unsaved", show.problem(words))

    def _ended(self, status: Status) -> None:
        merged = status.merged
        if merged is None or status.out is None:
            return
        numbers = {"method": merged.plan.made.name, "bytes": str(sum(step.out.nbytes for step in merged.plan.steps))}
        if merged.distance:
            numbers["distance from the base"] = merged.distance[0].percent()
        page = status.out / PAGE_NAME
        html = page.read_text(encoding="utf-8") if page.is_file() else ""
        self.add_run(
            "merge", status.out.name, merged.plan.recipe or self.text, merged.seconds, numbers, html, reference(status.out)
        )
        self._facts.pop(reference(status.out), None)  # it may have been replaced
        threading.Thread(target=self._list_models, daemon=True).start()

    # ---- runs

    def add_run(
        self, kind: str, title: str, recipe: str, seconds: float, numbers: Mapping[str, str], page: str = "", model: str = ""
    ) -> int:
        """Record a run, and return its number. page: its report, as HTML; model: the path of its result."""
        with self._lock:
            number = self.kept.next_id()
            run = Run(number, kind, time.time(), title, recipe, round(seconds, 3), dict(numbers), bool(page), model)
            self.kept.add(run, page)
            self._show_runs()
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


def _survives(found: Preview) -> dict[str, list[float | None]]:
    """For each model of the recipe, the share that survives in each layer."""
    layers = [layer for layer in found.layers if layer.name.rpartition(".")[2].isdigit()]

    def share(layer: Any, i: int) -> float | None:
        kept = layer.models[i]
        return None if kept is None or kept.survives != kept.survives else round(min(1.0, max(0.0, kept.survives)), 4)

    return {name: [share(layer, i) for layer in layers] for i, name in enumerate(found.names)}


def _command(run: Run) -> str:
    """The equivalent command. The recipe is saved as recipe.yml."""
    if run.kind == "merge":
        return f"weightsmith merge recipe.yml {shlex.quote(run.model)}"
    if run.kind == "look":
        base, *others = run.title.split(", ")
        if len(others) > 1:
            return f"weightsmith diff --base {shlex.join([base, *others])}"
        return f"weightsmith {'diff' if others else 'inspect --stats'} {shlex.join([base, *others])}"
    return "weightsmith preview recipe.yml"


def _shown_work(status: Status) -> dict[str, Any]:
    """A merge, for the page."""
    share = status.reading.share if status.reading is not None else 0.0
    name = status.out.name if status.out is not None else ""
    shown = {"state": status.state, "number": status.number, "name": name, "share": round(share, 3)}
    return {**shown, "html": show.status(status)}


def listed_methods() -> list[dict[str, str]]:
    """The merge methods, for the picker."""
    return [
        {
            "name": method.name,
            "title": show.plain(method.title),
            "family": family,
            "use": method.use,
            "html": show.about(method),
        }
        for method in methods.all_methods()
        for family in [show.family(method)]
    ]
