"""`Find a good merge`: `weightsmith.auto` on the models that the page has chosen, with its stages as the page says them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from weightsmith import Auto, ParameterError, Report, Unsupported
from weightsmith._app.studio import draft, show
from weightsmith._app.studio.check import NOTHING_WRITTEN, Mend, PageError, model_allowed
from weightsmith._app.studio.places import Places
from weightsmith.plugin import Meter, Reading, count, install

FEWEST, MOST = 2, 10
"""Fine-tunes of a search."""

STAGES: Mapping[str, str] = {
    "text": "Each fine-tune writes a text",
    "references": "Measure each fine-tune on its own text",
    "strengths": "Find out how strongly to merge",
    "statistics": "Collect statistics of each fine-tune",
    "candidates": "Compare the candidates",
    "writing": "Write the best one",
}
"""The stages of `weightsmith.auto`, by the word that it begins them with."""
_GIVEN = "Read your texts"
_STAGE = re.compile(r"(\w+)(?: \d/\d:)? (.+)")


@dataclass(frozen=True, slots=True)
class MergeSearch:
    """What a search merges, and where to.

    texts      of each fine-tune, by its name in the recipe; {}: each writes its own
    overwrite  whether a result of this name is replaced
    """

    base: str
    fine_tunes: tuple[str, ...]
    name: str
    texts: Mapping[str, str]
    overwrite: bool = False

    @classmethod
    def of_recipe(cls, recipe: str, name: str, texts: Mapping[str, str], *, overwrite: bool = False) -> MergeSearch:
        """The base and the fine-tunes that a recipe names. Texts that are empty are left out."""
        shown = draft.read(recipe)
        fine_tunes = tuple(model for model in dict.fromkeys(shown.models) if model != shown.base)
        written = {model: text for model in fine_tunes if (text := texts.get(model, "")).strip()}
        return cls(shown.base, fine_tunes, name.strip(), written, overwrite)

    def check(self, places: Places, max_characters: int) -> Path:
        """The folder to write.

        Raises PageError for what is missing, PlanError for a model that may not be read, Unsupported without torch.
        """
        if not can_search():
            raise Unsupported("finding a merge needs torch", fix=f"run {install('calibration')}")
        choose = Mend("models", "Choose models")
        if not self.base:
            raise PageError("no base is chosen yet", choose, fix="press Base on the model that the others were tuned from")
        if not FEWEST <= len(self.fine_tunes) <= MOST:
            verb = "is" if len(self.fine_tunes) == 1 else "are"
            what = f"{count(len(self.fine_tunes), 'fine-tune')} {verb} chosen, and {FEWEST} to {MOST} can be merged"
            raise PageError(what, choose, fix="press Add on each fine-tune")
        if self.texts and (missing := [model for model in self.fine_tunes if model not in self.texts]):
            fix = "give a text for each fine-tune, or for none: each then writes its own"
            raise PageError(f"there is no text for {', '.join(missing)}", Mend("find", "Write a text"), fix=fix)
        if any(len(text) > max_characters for text in self.texts.values()):
            raise ParameterError(f"a text has up to {max_characters:,} characters", fix="shorten it")
        for model in (self.base, *self.fine_tunes):
            model_allowed(model, places)
        if self.overwrite and not places.alone:
            what = "a studio that others can reach replaces no result"
            raise ParameterError(what, where=self.name, fix="choose another name", state=NOTHING_WRITTEN)
        return places.target(self.name)

    def text_files(self, folder: Path) -> dict[str, str] | None:
        """Write the texts to a folder, and name the file of each fine-tune; None if there are none."""
        files = dict[str, str]()
        for number, (model, text) in enumerate(self.texts.items(), 1):
            path = folder / f"{number}.txt"
            path.write_text(text, encoding="utf-8")
            files[model] = str(path)
        return files or None


def can_search() -> bool:
    """Whether torch is installed."""
    return find_spec("torch") is not None


class Stages(Meter):
    """Shows the stages of a search as they come, and stops it when asked to.

    put   shows a sentence, and HTML
    stop  raises if the search is to stop
    """

    def __init__(self, search: MergeSearch, put: Callable[[str, str], None], stop: Callable[[], None]) -> None:
        first = {"text": _GIVEN} if search.texts else {}
        self.titles = {**STAGES, **first}
        self._put, self._stop = put, stop
        self._stage, self._detail = "text", ""

    def say(self, text: str) -> None:
        """Take a stage, as `strengths 3/5: the base and the mean`; any other text is a detail of the present one."""
        self._stop()
        match = _STAGE.fullmatch(text)
        if match and match[1] in self.titles:
            self._stage, self._detail = match[1], match[2]
        else:
            self._detail = text
        self._show(None)

    def show(self, reading: Reading) -> None:
        """Take how far the present stage is. Called about ten times a second."""
        self._stop()
        self._show(reading.share)

    def close(self) -> None:
        """Nothing to clear up."""

    def _show(self, share: float | None) -> None:
        number = [*self.titles].index(self._stage) + 1
        doing = f"Step {number} of {len(self.titles)}: {self.titles[self._stage].lower()}"
        self._put(doing, show.stages([*self.titles.values()], number - 1, self._detail, share))


def numbers(result: Auto) -> dict[str, str]:
    """The numbers of a search, for the list of runs."""
    best = next(score for score in result.candidates if score.name == result.choice.name)
    change = best.nats_change if result.with_texts else best.divergence_change
    gain = "" if change is None else f"{-change.value:.4f} ± {change.error:.4f} nats a token better"
    return {"chosen": result.choice.name, **({"against the mean": gain} if gain else {})}


def page_words(report: Report) -> tuple[str, ...]:
    """The conclusions of a search. What names an option of the command line is said in the page's words."""
    return tuple(_OPTIONS.sub(", under Texts,", sentence) for sentence in report.summary)


_OPTIONS = re.compile(r",? --text [A-Z=]+,")
