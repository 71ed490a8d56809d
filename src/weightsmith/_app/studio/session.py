"""What the page calls: one method for each thing that can be done on it. Without Gradio."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightsmith import _methods as methods
from weightsmith._app.studio import compare, draft, show
from weightsmith._app.studio.check import allowed, check, first_finding, model_allowed
from weightsmith._app.studio.places import Places, reference
from weightsmith._app.studio.work import Work, unfinished
from weightsmith._base.errors import NOTHING_WRITTEN, ParameterError, PlanError, WeightsmithError, report
from weightsmith._reports.look.diff import diff
from weightsmith._reports.look.inspect import Inspection, inspect
from weightsmith._reports.look.pages import comparison_page, difference_page, inspection_page
from weightsmith._reports.look.preview import preview

_TICK_SECONDS = 0.25


class Session:
    """The studio of a process. One for all who have its page open: it has one merge.

    Every argument comes from a browser. Recipes are checked by `allowed`, single models by `model_allowed`, names of results by
    `Places.target`. Errors come back as HTML.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.work = Work()

    # ---- the recipe

    def models(self) -> list[tuple[str, str]]:
        """Labels and references of the models in the folders."""
        return [(f"{found.ref} (adapter)" if found.adapter else found.ref, found.ref) for found in self.places.models()]

    def begin(self, goal: str, base: str | None, chosen: Sequence[str]) -> str:
        """The recipe of a goal."""
        if goal not in draft.GOALS_SHOWN:
            raise ParameterError(f"there is no goal {goal!r}")
        kept = draft.GOALS_SHOWN[goal].adapter
        return draft.begin(goal, base or "", chosen if kept else self.places.on_base(chosen, base or ""))

    def rebuild(self, text: str, goal: str | None, method: str | None, base: str | None, chosen: Sequence[str]) -> str:
        """The recipe with another base, other models or another method.

        The goal's recipe as long as nobody has changed it. A recipe that cannot be read yet stays as it is.
        """
        now = draft.read(text)
        if (now.held and text.strip()) or not (goal or method):
            return text
        untouched = not text.strip() or (goal and draft.as_text(text) == draft.begin(goal, now.base, now.models))
        if goal and untouched and (not method or now.method in ("", method)):
            return self.begin(goal, base, chosen)
        on_base = self.places.on_base(chosen, base or "")
        return draft.rebuilt(text, method or now.method, base or "", on_base)

    def edit(self, text: str, event: Mapping[str, Any]) -> str:
        """The recipe with what sliders and curves were moved to. event: {"values": [[path, value], …]}."""
        pairs = event.get("values")
        values: dict[draft.Path, Any] = {}
        for pair in pairs if isinstance(pairs, list) else []:
            if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list):
                if all(isinstance(step, str | int) for step in pair[0]):
                    values[tuple(pair[0])] = pair[1]
        return draft.changed(text, values)

    def check(self, text: str) -> str:
        """What is wrong with the recipe."""
        return show.notes(check(text, self.places)) if text.strip() else show.hint("Choose a goal, a base and models.")

    # ---- looking

    def about(self, method: str) -> str:
        """The documentation of a method."""
        return show.about(methods.get(method))

    def facts(self, names: Sequence[str | None]) -> str:
        """What the chosen models are."""
        found: list[Inspection | str] = []
        for name in dict.fromkeys(names):
            try:
                if name:
                    found.append(inspect(model_allowed(name, self.places), progress=False))
            except WeightsmithError as error:
                found.append(f"{name}: {first_finding(error).what}")
        return show.facts(found)

    def preview(self, text: str) -> str:
        """What the merge will do."""
        try:
            return show.preview(preview(allowed(text, self.places), progress=False))
        except PlanError:
            return show.hint("The preview appears when the recipe is correct.")
        except WeightsmithError as error:
            return show.problem(report(error))

    def look(self, base: str | None, chosen: Sequence[str]) -> str:
        """One model: what it is. Two: what they differ in. More: how the task vectors of all but the first fit."""
        try:
            names = [base, *self.places.on_base(chosen, base)] if base else list(chosen)
            every = [model_allowed(name, self.places) for name in names]
            if len(every) > 2:
                found = comparison_page(diff(*every[1:], base=every[0], progress=False))
            elif len(every) == 2:
                found = difference_page(diff(every[0], every[1], progress=False))
            elif every:
                found = inspection_page(inspect(every[0], stats=True, progress=False))
            else:
                return show.hint("Choose a base or models.")
        except WeightsmithError as error:
            return show.problem(report(error))
        return show.page(found)

    # ---- merging

    def start(self, text: str, name: str, overwrite: bool, again: bool) -> str:
        """Begin the merge; what is wrong, or nothing. again: discard unfinished work of this name."""
        try:
            recipe = allowed(text, self.places)
            if (overwrite or again) and not self.places.alone:
                what = "a studio that others can reach replaces no result, and discards no unfinished work"
                raise ParameterError(what, where=name, fix="choose another name", state=NOTHING_WRITTEN)
            self.work.start(recipe, self.places.target(name.strip()), overwrite=overwrite is True, resume=again is not True)
        except WeightsmithError as error:
            return show.problem(report(error))
        return ""

    def watch(self) -> Iterator[tuple[str, str]]:
        """How far the merge is, until nothing runs; at its end its report too, as HTML."""
        while (status := self.work.status).state == "running":
            yield show.status(status), ""
            time.sleep(_TICK_SECONDS)
        made = status.out / "report.html" if status.out is not None and status.state == "done" else None
        yield show.status(status), made.read_text(encoding="utf-8") if made is not None and made.is_file() else ""

    def made(self) -> list[str]:
        """The result of the last merge, as a recipe names it."""
        status = self.work.status
        return [reference(status.out)] if status.out is not None and status.state == "done" else []

    def resumes(self, name: str) -> bool:
        """Whether a merge of this name was interrupted."""
        try:
            return unfinished(self.places.target(name.strip()))
        except WeightsmithError:
            return False

    # ---- comparing

    def compare(self, names: Sequence[str], prompt: str, text: str, new_tokens: float) -> Iterator[str]:
        """The table, model by model."""
        if not names or not prompt.strip():
            yield show.hint("Choose models, and write a prompt.")
            return
        found: list[compare.Sample] = []
        yield show.samples(found, prompt, names[0])
        try:
            for sample in compare.compare(names, self.places, prompt=prompt, text=text, new_tokens=int(new_tokens)):
                found.append(sample)
                yield show.samples(found, prompt, names[len(found)] if len(found) < len(names) else "")
        except WeightsmithError as error:
            yield show.problem(report(error))
