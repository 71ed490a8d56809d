"""What the page says before anything goes wrong: steps, reasons, limits; and when the disk or the server fails."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.app.studio.models import make
from tests.app.studio.serving import Studio, serving, start, stop
from tests.app.studio.visit import SLOW_MS, Visit
from tests.browser_help import browser

__all__ = ["browser"]

pytestmark = [pytest.mark.reader, pytest.mark.slow]
FR, DE, BASE = "./models/fr", "./models/de", "./models/base"
RUNS_MODELS = find_spec("torch") is not None and find_spec("transformers") is not None
RECIPE = f"""merge_method: ties
base_model: {BASE}
models:
  - {{model: {FR}, parameters: {{weight: 1.0, density: 0.5}}}}
  - {{model: {DE}, parameters: {{weight: 1.0, density: 0.5}}}}
dtype: bfloat16
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("look").resolve()
    make(root)
    broken = root / "models" / "broken"
    shutil.copytree(root / "models" / "fr", broken)
    (broken / "config.json").write_text("{")
    return root


@pytest.fixture
def studio(root: Path, request: pytest.FixtureRequest) -> Iterator[Studio]:
    with serving(root, out=f"out/{re.sub(r'[^a-z0-9]+', '-', request.node.name)[-60:].strip('-')}") as served:
        yield served


def disabled(page: Any, button: str) -> bool:
    return bool(page.locator(button).is_disabled())


def top_of(page: Any, selector: str) -> float:
    return float(page.locator(selector).bounding_box()["y"])


@pytest.mark.parametrize("width", [1440, 390])
def test_the_first_screen_leads_to_a_merge(browser: Any, studio: Studio, width: int) -> None:
    with Visit(browser, studio.address, width) as visit:
        page = visit.page
        visit.has("#why", "Choose a base and models.")
        for button in ("#merge", "#try-first", "#look"):
            assert disabled(page, button), button
        badges = "#steps .badge" if width < 500 else ".pane .badge"
        assert [badge.inner_text() for badge in page.locator(badges).all()] == ["1", "2", "3"]
        words = page.inner_text("body").lower()
        assert "desk" not in words
        assert "disjoint" not in words
        height = page.locator("footer").bounding_box()["height"]
        assert height < 90
        visit.step("mix")
        assert not page.locator("#text").is_visible(), "the recipe is folded"
        page.click("#example")
        visit.has("#strips", "/demo/french")
        visit.until("!document.querySelector('#merge').disabled")
        visit.step("models")
        visit.has("#cards", "/demo/german")
        page.click("#merge")
        visit.has("#progress", "Done")
        visit.until("document.querySelector('#merge').disabled")  # it is there now
        visit.has("#why", "merged exists: rename, or tick")
        page.check("#overwrite")
        visit.until("!document.querySelector('#merge').disabled")
        page.fill("#name", "../evil")
        visit.until("document.querySelector('#merge').disabled")
        assert page.locator("footer").bounding_box()["height"] == height
        visit.fine()


@pytest.mark.parametrize("width", [1440, 390])
def test_without_models_the_demos_are_the_next_step(browser: Any, tmp_path: Path, width: int) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "adapters").mkdir()
    with serving(tmp_path.resolve()) as studio, Visit(browser, studio.address, width) as visit:
        visit.has("#found", "No models were found")
        visit.fine()
        buttons = visit.page.get_by_role("button", name="Use the demo's models")
        assert buttons.count() == 1, "one next step"
        assert not visit.page.get_by_role("button", name="Find a good merge").count()
        buttons.click()
        visit.has("#cards", "/demo/german")
        visit.step("models")
        assert not buttons.count()
        visit.until("!document.querySelector('#merge').disabled")
        visit.fine()


def test_what_is_missing_is_said_step_by_step(browser: Any, studio: Studio) -> None:
    with Visit(browser, studio.address) as visit:
        page = visit.page
        visit.choose(FR)
        visit.has("#why", "Choose a base and 1 more model.")
        assert not page.locator("#notes .ws-error").count(), "nothing is wrong"
        visit.choose(BASE, "use as base")
        visit.has("#why", "Choose 1 more model.")
        visit.choose(DE)
        visit.until("!document.querySelector('#merge').disabled")
        broken = page.locator("#cards li[data-ref='./models/broken']")
        assert broken.locator("p.ws-error").count() == 1
        assert broken.locator("button").count() == 0
        visit.write(RECIPE.replace("ties", "tise"))
        visit.has("#why", "The recipe has 1 problem.")
        assert page.locator("#cards li[data-ref='./models/fr'] [data-act=add]").get_attribute("aria-pressed") == "true"
        page.click("#tab-tune")
        page.fill("#tune-text", "some text")
        visit.has("#tune-fit", "when the recipe is correct")
        page.click("#recipe > summary")
        page.click("#notes button[data-line]")
        assert page.evaluate("document.activeElement.id") == "text"
        visit.fine()


def test_limits_are_said_while_typing(browser: Any, studio: Studio) -> None:
    with Visit(browser, studio.address) as visit:
        page = visit.page
        visit.write(RECIPE)
        visit.until("!document.querySelector('#merge').disabled")
        page.click("#tab-sweep")
        page.fill("#values", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10")
        visit.has("#sweep-limit", "Enter up to 9 numbers")
        page.fill("#values", "0.2 0.4")
        assert not disabled(page, "#sweep-now")
        page.click("#tab-try")
        if not RUNS_MODELS or find_spec("cmaes") is None:
            visit.has("#try-limit", "needs torch and transformers") if not RUNS_MODELS else None
            return
        page.fill("#prompt", "")
        visit.has("#try-limit", "Enter a prompt or some text.")
        assert disabled(page, "#try-now")
        page.evaluate("document.querySelector('#judged').value = 'x'.repeat(100001)")
        page.locator("#judged").press("End")
        page.locator("#judged").press("y")
        visit.has("#try-limit", "100,002 characters, and the limit is 100,000")
        page.click("#tab-tune")
        page.fill("#tune-text", " ".join(f"word{i}" for i in range(30)))
        page.fill("#row-tokens", "64")
        visit.has("#tune-fit", "of up to 64 tokens, and 4 are needed")
        visit.has("#tune-limit", "The text is too short.")
        assert disabled(page, "#tune-now")
        page.click("#tune-fit button")
        visit.has("#tune-fit", "to tune on, 2 for the report")
        assert int(page.input_value("#row-tokens")) < 64
        visit.until("!document.querySelector('#tune-now').disabled")
        page.get_by_label(f"tune weight of {FR}: least value").fill("3")
        visit.has("#tune-limit", "Each range must go from a smaller number to a larger one.")
        visit.fine()


@pytest.mark.parametrize("width", [1440, 390])
def test_many_models_are_searched_and_long_names_keep_their_end(browser: Any, tmp_path: Path, width: int) -> None:
    root = tmp_path.resolve()
    make(root)
    for i in range(60):
        folder = root / "models" / f"a-long-organisation--a-long-name-of-a-model-that-has-no-room-{i:03}"
        shutil.copytree(root / "models" / "fr", folder, copy_function=os.link)
    with serving(root) as studio, Visit(browser, studio.address, width) as visit:
        page = visit.page
        visit.has("#found", "64 of 64 models")
        assert page.evaluate("document.activeElement.id") == "search"
        cards = page.locator("#cards")
        assert cards.evaluate("e => e.scrollHeight > 4 * e.clientHeight"), "the list scrolls by itself"
        assert page.locator("#models").evaluate("e => e.scrollHeight <= e.clientHeight")
        assert top_of(page, "#hub-name" if page.locator("#hub-name").is_visible() else "#search") < 400
        # In one call: a locator may hand over a card that a preview has just replaced, and that has no size.
        middle, end = page.evaluate(
            """[...document.querySelectorAll("#cards .ws-mid")[5].children].slice(1).map(span => ({
              text: span.innerText, cut: span.scrollWidth > span.clientWidth, overflow: getComputedStyle(span).textOverflow
            }))"""
        )
        assert re.search(r"-\d{3}$", end["text"])
        assert not end["cut"], "its end is seen"
        assert (middle["cut"], middle["overflow"]) == (True, "ellipsis")
        page.evaluate("document.activeElement.blur()")
        page.evaluate("document.querySelector('#skip a').focus()")
        assert page.locator("#skip").bounding_box()["y"] > 0, "skip links are seen when they have the focus"
        assert [link.inner_text() for link in page.locator("#skip a").all()] == ["Models", "Mix", "Result", "Merge"]
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.closest('#mix') !== null")
        visit.fine()


# ---- a disk that refuses


def test_it_is_not_saved_until_it_is_on_the_disk(browser: Any, root: Path) -> None:
    studio = start(root, out="out/refusing")
    try:
        with Visit(browser, studio.address) as visit:
            page, out = visit.page, root / "out" / "refusing"
            visit.write(RECIPE)
            visit.saved()
            visit.previewed()

            def refused(why: str, edit: str) -> None:
                visit.write(f"{RECIPE}# {edit}\n")
                page.locator("#saved", has_text=re.compile(f"^Not saved: ({why})$")).wait_for()
                page.locator("#unsaved", has_text="is kept in this page").wait_for()
                page.wait_for_timeout(2500)  # it stays
                assert page.inner_text("#saved").startswith("Not saved"), "nothing was written meanwhile"
                tab = visit.context.new_page()  # another tab says so too
                tab.goto(visit.address)
                tab.locator("#unsaved", has_text="Not saved").wait_for()
                tab.close()

            def kept(edit: str) -> None:
                visit.saved()
                page.locator("#unsaved").wait_for(state="hidden")
                assert json.loads((out / ".studio" / "recipe.json").read_text())["text"] == f"{RECIPE}# {edit}\n"

            before = resource.prlimit(studio.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(studio.process.pid, resource.RLIMIT_FSIZE, (16, before[1]))  # as on a disk without space
            refused("File too large", "full")
            resource.prlimit(studio.process.pid, resource.RLIMIT_FSIZE, before)
            kept("full")
            shutil.rmtree(out)
            out.write_text("no folder")
            refused("File exists|Not a directory", "removed")
            out.unlink()
            kept("removed")
            assert json.loads((out / ".studio" / "runs.json").read_text()), "the runs are there again"
    finally:
        stop(studio)


# ---- a server that dies


@pytest.mark.skipif(not RUNS_MODELS, reason="needs torch and transformers")
def test_a_try_that_was_killed_is_interrupted(browser: Any, root: Path) -> None:
    studio = start(root, out="out/killed")
    with Visit(browser, studio.address) as visit:
        page = visit.page
        visit.write(RECIPE)
        visit.until("!document.querySelector('#merge').disabled")
        page.click("#tab-try")
        page.fill("#judged", "a long text " * 8000)
        page.click("#try-now")
        visit.has("#try .doing", "running the merge")
        studio.kill()
        page.locator("#dead").wait_for()
        visit.has("#why", "The studio's server does not answer.")
        assert disabled(page, "#merge")
        studio = start(root, out="out/killed", port=studio.port)
        visit.has("#tried", "Interrupted: the merge.")
        assert page.inner_text("#try .doing") == ""
        visit.until("!document.querySelector('#try-now').disabled")
        page.reload()
        visit.has("#tried", "Interrupted: the merge.")
        visit.fine()
    stop(studio)


def test_the_bar_says_nothing_that_is_not_known(browser: Any, studio: Studio) -> None:
    """The server stops in a merge; what it last said of speed and time left is not shown."""
    with Visit(browser, studio.address) as visit:
        page = visit.page
        visit.write(RECIPE)
        visit.until("!document.querySelector('#merge').disabled")
        running = "<div><p><b>mine</b> merging · 36% · 250 MB/s · 4.8 s left</p></div>"
        shown = {"state": "running", "number": 9, "name": "mine", "share": 0.36, "html": running, "problem": ""}
        page.route("**/events", lambda route: route.fulfill(body=f"data: {json.dumps({'work': shown})}\n\n", headers=EVENTS))
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # the page listens again
        visit.has("#progress", "4.8 s left")
        page.unroute("**/events")
        page.route("**/events", lambda route: route.abort())
        page.locator("#dead").wait_for()
        assert page.inner_text("#progress") == "No news of mine."


EVENTS = {"content-type": "text/event-stream"}


# ---- a server that answers late, or not at all


def test_a_recipe_is_ready_when_its_own_check_says_so(browser: Any, studio: Studio) -> None:
    """Not when the check of the recipe before does."""
    with Visit(browser, studio.address) as visit:
        page = visit.page
        visit.write(RECIPE)
        visit.until("!document.querySelector('#merge').disabled")
        document = json.loads(page.evaluate(DOCUMENT))
        notes = {"html": "", "marks": [], "good": True, "reason": "", "costs": []}
        newer = document | {"version": document["version"] + 1}

        def events(**values: object) -> None:
            page.unroute("**/events")
            body = f"data: {json.dumps(values)}\n\n"
            page.route("**/events", lambda route: route.fulfill(body=body, headers=EVENTS))
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # the page listens again

        events(document=newer)
        visit.has("#why", "Checking the recipe")
        assert disabled(page, "#merge")
        events(document=newer, notes=notes | {"version": document["version"]})
        page.wait_for_timeout(700)
        assert disabled(page, "#merge")
        events(document=newer, notes=notes | {"version": newer["version"]})
        visit.until("!document.querySelector('#merge').disabled")


DOCUMENT = """fetch('/events').then(async answer => {
  const reader = answer.body.getReader();
  let text = "";
  const first = () => text.split("\\n\\n").slice(0, -1).find(event => event.startsWith("data:"));
  while (!first()) text += new TextDecoder().decode((await reader.read()).value);
  reader.cancel();
  return JSON.stringify(JSON.parse(first().slice(5)).document);
})"""


def test_a_name_is_asked_for_until_the_answer_is_about_it(browser: Any, studio: Studio) -> None:
    """Answers that are lost, or that arrive after those to later questions, say nothing of the name that is there now."""
    with Visit(browser, studio.address) as visit:
        page = visit.page
        visit.write(RECIPE)
        visit.until("!document.querySelector('#merge').disabled")
        asked: list[str] = []
        held: list[Any] = []

        def name(route: Any) -> None:
            asked.append(json.loads(route.request.post_data)["name"])
            if asked[-1] == "../late":
                held.append(route)
            elif asked.count("lost") == 1 and asked[-1] == "lost":
                route.abort()
            else:
                route.continue_()

        page.route("**/do/name", name)
        page.fill("#name", "lost")
        visit.has("#why", "Checking the name")
        assert disabled(page, "#merge")
        visit.until("!document.querySelector('#merge').disabled")
        assert asked.count("lost") == 2
        page.fill("#name", "../late")
        while not held:
            page.wait_for_timeout(20)
        page.fill("#name", "mine")
        visit.until("!document.querySelector('#merge').disabled")
        held[0].continue_()
        page.wait_for_timeout(700)
        assert not disabled(page, "#merge"), "mine is a good name"


@pytest.mark.parametrize("answer", ["", '{"number": 1, "docum'])
def test_an_edit_whose_answer_is_lost_is_sent_again(browser: Any, studio: Studio, answer: str) -> None:
    """None at all, or half of one."""
    with Visit(browser, studio.address) as visit:
        page = visit.page
        visit.write(RECIPE)
        visit.until("!document.querySelector('#merge').disabled")
        lost: list[Any] = []

        def edit(route: Any) -> None:
            lost.append(route)
            if len(lost) > 1:
                route.continue_()
            elif answer:
                route.fulfill(body=answer, headers={"content-type": "application/json"})

        page.route("**/do/edit", edit)
        visit.write(f"{RECIPE}# more\n")
        while not lost:
            page.wait_for_timeout(20)
        if not answer:
            assert page.inner_text("#saved") == "Saving …"
        visit.saved()
        assert visit.recipe == f"{RECIPE}# more\n"
        visit.until("!document.querySelector('#merge').disabled")
        visit.fine()


def test_a_connection_that_was_lost_in_between_is_made_again(browser: Any, studio: Studio) -> None:
    with Visit(browser, studio.address) as visit:
        page = visit.page
        lost: list[Any] = []
        page.route("**/events", lambda route: route.continue_() if lost else lost.append(route))
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # the page listens again
        page.locator("#dead").wait_for()
        page.locator("#dead").wait_for(state="hidden")
        visit.saved()


def test_a_report_that_is_there_before_the_answer_stays(browser: Any, studio: Studio) -> None:
    """As on a slow link: the comparison is done when the page learns that it has begun."""
    with Visit(browser, studio.address) as visit:
        page = visit.page
        visit.write(RECIPE)
        visit.until("!document.querySelector('#merge').disabled")
        late: list[Any] = []
        page.route("**/do/look", lambda route: late.append((route, route.fetch())))
        page.click("#look")
        page.locator("#frame iframe").wait_for(state="attached", timeout=SLOW_MS)
        route, answer = late[0]
        route.fulfill(response=answer)
        page.locator("#report").wait_for()
        assert page.locator("#frame iframe").is_visible()
        visit.fine()
