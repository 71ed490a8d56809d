"""`Find a good merge` on the page: from an empty desk to a written merge, stopped, killed and refused on the way."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.app.studio.models import make
from tests.app.studio.serving import Studio, serving, start, stop
from tests.app.studio.visit import SLOW_MS, Visit
from tests.browser_help import browser
from weightsmith import ParameterError, PlanError, Report
from weightsmith._app.studio.check import PageError
from weightsmith._app.studio.places import Places
from weightsmith._app.studio.search import STAGES, MergeSearch, Stages, page_words
from weightsmith.plugin import Reading

__all__ = ["browser"]

BASE, FR, DE = "./models/base", "./models/fr", "./models/de"
TORCH = find_spec("torch") is not None


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("find").resolve()
    make(root)
    return root


def _text(seed: int) -> str:
    words = random.Random(seed).choices("what it reads and writes and how fast that is".split(), k=1500)
    return "".join(f"{' '.join(words[i : i + 10])}.\n" for i in range(0, 1500, 10))


def _chosen(visit: Visit) -> None:
    """From an empty desk to a base and two fine-tunes."""
    page = visit.page
    visit.step("mix")
    assert page.locator("#start button").first.inner_text().strip() == "Find a good merge"
    page.click("#find-first")
    visit.has("#find-limit", "Press Base on the model that the others were tuned from.")
    assert page.locator("#find-now").is_disabled()
    visit.choose(BASE, "use as base")
    visit.has("#find-limit", "Press Add on two or more fine-tunes.")
    visit.choose(FR)
    visit.has("#find-limit", "Press Add on one more fine-tune.")
    visit.choose(DE)
    visit.saved()
    visit.step("mix")
    page.click("#find-open")
    visit.until("!document.querySelector('#find-now').disabled")
    assert page.locator("#find-models dd").all_text_contents() == [BASE, FR, DE]


def _write_texts(visit: Visit) -> None:
    page = visit.page
    page.click("#find-texts > summary")
    page.locator(f"#find-fields textarea[data-model='{FR}']").fill(_text(1))
    visit.has("#find-limit", "Give every fine-tune a text, or none.")
    page.locator(f"#find-fields textarea[data-model='{DE}']").fill(_text(2))
    visit.until("!document.querySelector('#find-now').disabled")


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.skipif(not TORCH, reason="it needs torch")
@pytest.mark.parametrize("width", [1440, 390])
def test_from_an_empty_desk_to_a_merge(browser: Any, root: Path, width: int) -> None:
    out = root / f"out-{width}"
    with serving(root, out=out.name) as studio, Visit(browser, studio.address, width) as visit:
        page = visit.page
        _chosen(visit)
        _write_texts(visit)
        page.fill("#name", "best")
        page.click("#find-now")
        page.locator("#find .doing", has_text="of 6: ").wait_for(timeout=SLOW_MS)
        page.locator("#find .stop").click()
        page.locator("#find-result", has_text="Stopped.").wait_for(timeout=SLOW_MS)
        assert not (out / "best").exists()
        visit.until("!document.querySelector('#find-now').disabled")
        page.click("#find-now")
        page.locator("#find-result .ws-verdict", has_text="best is ").wait_for(timeout=SLOW_MS)
        visit.has("#find-result", f"Written: ./{out.name}/best")
        assert (out / "best" / "recipe.yml").is_file()
        assert (
            not (out / ".studio").joinpath("running.json").exists() or "auto" not in (out / ".studio/running.json").read_text()
        )
        visit.has("#find-limit", "best exists: rename, or tick “replace it”.")
        page.locator("#find-result button", has_text="See all candidates").click()
        page.frame_locator("#frame iframe").locator("h1", has_text="best: a merge of fr, de").wait_for()
        page.click("#tab-runs")
        page.locator("#rows li[data-kind=auto] button", has_text="Load").click()
        visit.saved()
        assert visit.recipe == (out / "best" / "recipe.yml").read_text()
        visit.has("#notes", "The recipe is correct")
        visit.fine()


@pytest.mark.reader
@pytest.mark.slow
@pytest.mark.skipif(not TORCH, reason="it needs torch")
def test_a_search_that_was_killed_says_so(browser: Any, root: Path) -> None:
    studio: Studio | None = start(root, out="killed")
    assert studio is not None
    try:
        with Visit(browser, studio.address) as visit:
            page = visit.page
            _chosen(visit)
            _write_texts(visit)
            page.click("#find-now")
            page.locator("#find .doing", has_text="of 6: ").wait_for(timeout=SLOW_MS)
            studio.kill()
            page.locator("#dead").wait_for()
            studio = start(root, out="killed", port=studio.port)
            page.locator("#find-result", has_text="Interrupted: a merge of ./models/fr, ./models/de.").wait_for()
            visit.has("#find-result", "Press Find a good merge to begin again.")
            visit.until("!document.querySelector('#find-now').disabled")
            assert page.locator("#find .doing").inner_text() == ""
            visit.fine()
    finally:
        if studio is not None:
            stop(studio)


RECIPE = f"merge_method: linear\nbase_model: {BASE}\nmodels:\n  - model: {FR}\n  - model: {DE}\n"


@pytest.fixture
def places(root: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.chdir(root)
    monkeypatch.setattr("weightsmith._app.studio.search.can_search", lambda: True)
    return Places.of([root / "models"], root / "out", hub=False)


def test_what_a_recipe_names_is_searched(places: Places) -> None:
    search = MergeSearch.of_recipe(RECIPE, " best ", {FR: "a text", DE: " ", "./models/other": "x"})
    assert search == MergeSearch(BASE, (FR, DE), "best", {FR: "a text"})
    with pytest.raises(PageError, match=r"there is no text for \./models/de"):
        search.check(places, 100)
    assert MergeSearch.of_recipe(RECIPE, "best", {}).check(places, 100) == places.out / "best"


@pytest.mark.parametrize(
    ("recipe", "name", "texts", "words"),
    [
        ("merge_method: linear\nmodels:\n  - model: ./models/fr\n", "best", {}, "no base is chosen yet"),
        (RECIPE.replace(f"  - model: {DE}\n", ""), "best", {}, "1 fine-tune is chosen, and 2 to 10 can be merged"),
        (RECIPE, "../best", {}, "cannot be the name of a result"),
        (RECIPE, "best", {FR: "x" * 101, DE: "y"}, "a text has up to 100 characters"),
    ],
)
def test_what_cannot_be_searched_is_refused(places: Places, recipe: str, name: str, texts: dict[str, str], words: str) -> None:
    with pytest.raises(ParameterError, match=words.replace("(", r"\(")):
        MergeSearch.of_recipe(recipe, name, texts).check(places, 100)


def test_a_model_outside_the_folders_is_refused(places: Places) -> None:
    with pytest.raises(PlanError, match="outside the folders"):
        MergeSearch.of_recipe(RECIPE.replace(FR, "../secret"), "best", {}).check(places, 100)


def test_who_reaches_the_studio_from_elsewhere_replaces_nothing(root: Path, places: Places) -> None:
    shared = Places(places.folders, places.out, hub=False, alone=False)
    with pytest.raises(ParameterError, match="replaces no result"):
        MergeSearch.of_recipe(RECIPE, "best", {}, overwrite=True).check(shared, 100)


def test_every_stage_of_the_function_has_words_on_the_page() -> None:
    """The stages are those that `weightsmith.auto` begins its sentences with."""
    source = Path(__import__("weightsmith._reports.auto.auto", fromlist=["auto"]).__file__).read_text()
    for word in STAGES:
        assert f'"{word} ' in source or f'"{word} ' in source.replace('f"', '"'), word
    shown = list[tuple[str, str]]()
    stages = Stages(MergeSearch(BASE, (FR, DE), "best", {}), lambda *words: shown.append(words), lambda: None)
    for sentence in ("text 1/5: fr writes text of its own (1 of 2)", "strengths 3/5: tsv_m at 0.4", "writing mean"):
        stages.say(sentence)
    stages.show(Reading("merging", 1, 4, None))
    assert [doing for doing, _ in shown] == [
        "Step 1 of 6: each fine-tune writes a text",
        "Step 3 of 6: find out how strongly to merge",
        "Step 6 of 6: write the best one",
        "Step 6 of 6: write the best one",
    ]
    assert "Tsv_m at 0.4" not in shown[1][1]
    assert "tsv_m at 0.4" in shown[1][1]
    assert "width:25.0%" in shown[-1][1]


def test_conclusions_name_no_option() -> None:
    words = page_words(Report("t", ("Give a text for each fine-tune, --text NAME=FILE, to find a strength for them.",), (), {}))
    assert words == ("Give a text for each fine-tune, under Texts, to find a strength for them.",)
