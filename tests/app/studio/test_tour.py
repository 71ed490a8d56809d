"""Forty steps of a first-time user, from an empty studio to a merged, tried and tuned model.

After every step the page says "Saved" only of what is on the disk, its controls show what the recipe says, and nothing is wider
than the page. Numbers are compared with those of the Python functions.
"""

from __future__ import annotations

import json
import random
import re
import resource
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import weightsmith
from tests.app.studio.serving import Studio, start, stop
from tests.app.studio.slow_link import slow_link
from tests.app.studio.visit import SLOW_MS, Visit, values_shown, values_written
from tests.browser_help import browser
from weightsmith.plugin import size, written

__all__ = ["browser"]

pytestmark = pytest.mark.slow
RUNS_MODELS = all(find_spec(name) is not None for name in ("torch", "transformers", "cmaes"))
BASE, FRENCH, GERMAN = "./out/demo/base", "./out/demo/french", "./out/demo/german"
WORDS = random.Random(2).choices("what it reads and writes and how fast that is".split(), k=500)
TEXT = "".join(f"{' '.join(WORDS[i : i + 10])}.\n" for i in range(0, 500, 10))


class Tour:
    """A user at work. steps: names of those that were taken."""

    def __init__(self, visit: Visit, studio: Studio, root: Path) -> None:
        self.visit, self.page, self.studio, self.root = visit, visit.page, studio, root
        self.out = root / "out"
        self.steps: list[str] = []

    def took(self, name: str, *, open_at: str = "") -> None:
        """Check what must hold after every step. open_at: pane to go on with, on a phone."""
        self.steps.append(name)
        self.visit.saved()
        kept = self.out / ".studio" / "recipe.json"
        on_disk = json.loads(kept.read_text())["text"] if kept.exists() else ""
        assert on_disk == self.visit.recipe, f"{name}: the page says Saved, and the disk has another recipe"
        if self.page.locator(".ws-control").count():
            shown, said = values_shown(self.page), values_written(on_disk)
            for key, value in said.items():  # a control shows four digits
                assert shown[key] == pytest.approx(value, rel=1e-3), (name, key)
        self.visit.fine()
        if open_at:
            self.visit.step(open_at)

    def absolute(self) -> str:
        return self.visit.recipe.replace("./out", str(self.out))

    def mixed(self, act: Callable[[], Any], name: str) -> None:
        """An edit on the mixing pane, that changes the recipe."""
        self.visit.step("mix")
        before = self.visit.recipe
        act()
        self.visit.until(f"document.querySelector('#text').value !== {json.dumps(before)}")
        self.took(name)

    def result(self, tab: str) -> None:
        self.visit.step("result")
        self.page.click(f"#tab-{tab}")


@pytest.mark.matrix  # of what the other tests of the studio do step by step; also on a phone, whose answers take 0.4 s
@pytest.mark.timeout(900)  # forty steps on a busy machine
@pytest.mark.parametrize(("width", "seconds"), [(1440, 0.0), (390, 0.4)])
def test_forty_steps(browser: Any, tmp_path: Path, width: int, seconds: float) -> None:
    root = tmp_path.resolve()
    (root / "models").mkdir()
    studio = start(root, out="out")
    try:
        with slow_link(studio.port) as link, Visit(browser, f"http://127.0.0.1:{link.port}/", width) as visit:
            link.seconds = seconds
            tour = Tour(visit, studio, root)
            begins(tour)
            mixes(tour)
            looks(tour)
            merges(tour)
            (tries if RUNS_MODELS else nullcontext)(tour)
            returns(tour)
            assert len(tour.steps) == len(set(tour.steps))
            assert len(tour.steps) >= (40 if RUNS_MODELS else 33)
    finally:
        stop(studio)


def begins(tour: Tour) -> None:
    """From nothing to a recipe."""
    visit, page = tour.visit, tour.page
    visit.has("#why", "Choose a base and models.")
    tour.took("open")
    page.click("#merge", force=True)
    assert page.inner_text("#progress") == ""
    tour.took("press a disabled button", open_at="mix")
    page.click("#example")
    visit.has("#strips", "/demo/french")
    tour.took("use the demo's models")
    visit.step("models")
    names = {page.locator("#cards li").nth(i).get_attribute("data-ref") for i in range(3)}
    assert names == {BASE, FRENCH, GERMAN}
    tour.took("see their cards")
    page.fill("#search", "german")
    visit.has("#found", "1 of 3 models")
    tour.took("search")
    page.fill("#search", "")
    visit.has("#found", "3 models")
    tour.took("show all again", open_at="result")
    visit.previewed()
    moved = weightsmith.preview(tour.absolute(), progress=False).total
    assert written(moved.share, "share") in page.inner_text("#shown .ws-verdict")
    for kept in moved.models:
        assert kept is not None
        assert f"{kept.survives:.1%} survives" in page.inner_text("#shown")
    tour.took("read the preview")
    summary = weightsmith.plan(tour.absolute()).summary()
    costs = page.locator("#costs")
    assert size(summary.write_bytes) in (costs.text_content() or "")
    assert size(summary.memory.peak_bytes) in (costs.text_content() or "")
    tour.took("read what it costs")


def mixes(tour: Tour) -> None:
    """Every way to edit."""
    visit, page = tour.visit, tour.page
    weight = page.get_by_label(f"weight of {FRENCH}", exact=True)
    before = visit.recipe
    tour.mixed(lambda: [weight.focus(), *[page.keyboard.press("ArrowLeft") for _ in range(5)]], "a slider by keyboard")
    page.wait_for_timeout(50)
    assert values_written(visit.recipe)[FRENCH, "weight"] == 0.95
    tour.mixed(lambda: page.click("#undo"), "undo")
    while visit.recipe != before:  # several presses may be several edits
        page.click("#undo")
        visit.saved()
    tour.mixed(lambda: page.click("#redo"), "redo")
    number = page.locator(f".ws-control[data-model='{GERMAN}'][data-name=weight] input[type=number]")
    tour.mixed(lambda: [number.fill("0.4"), number.press("Enter")], "a number")
    assert values_written(visit.recipe)[GERMAN, "weight"] == 0.4
    shape = f"weight of {FRENCH}"
    tour.mixed(lambda: page.get_by_label(f"{shape}: one value, by layer or by part").select_option("layer"), "by layer")
    tour.mixed(lambda: page.get_by_label(f"{shape}: shape").select_option("rising"), "a shape")
    tour.mixed(lambda: [page.locator(".ws-hit").first.focus(), page.keyboard.press("PageUp")], "a point of a curve")
    tour.mixed(lambda: page.get_by_label(f"{shape}: one value, by layer or by part").select_option("one"), "one value again")
    tour.mixed(lambda: page.select_option("#goal", "average"), "another goal")
    tour.mixed(lambda: page.click("#undo"), "back to the first goal")
    visit.step("mix")
    page.click("#method")
    page.locator("#methods[open]").wait_for()
    page.fill("#methods-search", "slerp")
    page.click("#methods-close")
    page.locator("#methods").wait_for(state="hidden")
    tour.took("look at methods, choose none")
    visit.unfold()
    tour.mixed(lambda: page.fill("#text", f"# mine\n{visit.recipe}"), "write a comment")
    recipe = visit.recipe
    tour.mixed(lambda: page.fill("#text", re.sub(r"merge_method: \w+", "merge_method: tise", recipe)), "a slip")
    visit.has("#why", "1 problem")
    assert page.locator("#merge").is_disabled()
    tour.mixed(lambda: page.fill("#text", recipe), "mend it")
    assert visit.recipe.startswith("# mine\n")
    visit.until("!document.querySelector('#merge').disabled")


def looks(tour: Tour) -> None:
    """Compare the models."""
    visit, page = tour.visit, tour.page
    visit.step("models")
    page.click(f"[aria-label='{GERMAN}: remove from the merge']")
    visit.until("!document.querySelector('#text').value.includes('german')")
    tour.took("remove a model")
    page.click(f"[aria-label='{GERMAN}: add to the merge']")
    visit.until("document.querySelector('#text').value.includes('german')")
    visit.until("!document.querySelector('#merge').disabled")
    tour.took("add it again")
    visit.step("models")
    page.click("#look")
    visit.step("result")
    page.locator("#frame iframe").wait_for(timeout=SLOW_MS)
    report = weightsmith.diff(*[str(tour.root / name) for name in (FRENCH, GERMAN)], base=str(tour.root / BASE), progress=False)
    page.frame_locator("#frame iframe").locator("h1", has_text="Task vectors of 2 models").wait_for()
    shown = page.frame_locator("#frame iframe").locator(".numbers").inner_text()
    for _, number in report.report().numbers:
        assert number in shown
    tour.took("compare the models")
    tour.result("sweep")
    page.fill("#values", "0.2, 0.8")
    page.click("#sweep-now")
    page.locator(".ws-sweep li").nth(1).wait_for()
    swept = page.locator("#swept option:checked").text_content() or ""
    assert swept
    tour.took("sweep")
    assert page.locator("#swept-cards .ws-bar").count() >= 4


def merges(tour: Tour) -> None:
    """Write the result, twice."""
    visit, page = tour.visit, tour.page
    page.fill("#name", "../evil")
    visit.until("document.querySelector('#merge').disabled")
    tour.took("a wrong name")
    page.fill("#name", "mine")
    visit.until("!document.querySelector('#merge').disabled")
    page.click("#merge")
    visit.has("#progress", "Done")
    assert weightsmith.verify(tour.out / "mine").tensors == len(weightsmith.plan(tour.absolute()).steps)
    again = weightsmith.merge(tour.absolute(), tour.root / "again", progress=False)
    assert (tour.out / "mine/model.safetensors").read_bytes() == (Path(again) / "model.safetensors").read_bytes()
    tour.took("merge")
    tour.result("report")
    page.frame_locator("#frame iframe").locator("h1", has_text="mine").wait_for()
    assert written(again.distance[0].share, "share") in page.frame_locator("#frame iframe").locator(".numbers").inner_text()
    tour.took("read its report")
    visit.has("#why", "mine exists: rename, or tick")
    assert page.locator("#merge").is_disabled()
    tour.took("the name is taken")
    page.check("#overwrite")
    visit.until("!document.querySelector('#merge').disabled")
    page.click("#merge")
    visit.until("document.querySelectorAll('#rows li[data-kind=merge]').length === 2")
    visit.has("#progress", "Done")
    tour.took("replace it")
    tour.result("runs")
    visit.until("document.querySelectorAll('#rows input[type=checkbox]').length >= 3")
    for tick in page.locator("#rows li[data-kind=merge] input[type=checkbox]").all():
        tick.check()
    visit.has("#two", "distance from the base")
    tour.took("compare two runs")


def tries(tour: Tour) -> None:
    """Run the merge, and tune it."""
    visit, page = tour.visit, tour.page
    tour.result("try")
    page.fill("#prompt", "")
    page.fill("#judged", TEXT)
    page.fill("#tokens", "4")
    page.click("#try-now")
    page.locator("#tried tbody tr").nth(3).wait_for(timeout=SLOW_MS)
    visit.until("document.querySelector('#try .doing').textContent === ''")
    numbers = page.locator("#tried .ws-n").all_inner_texts()
    mine = weightsmith.Judge.of_recipe(tour.absolute()).perplexity(TEXT, 8)
    base = weightsmith.Judge.of_model(str(tour.root / BASE)).perplexity(TEXT, 8)
    assert numbers[:2] == [f"{mine:.2f}", f"{base:.2f}"]
    tour.took("try")
    tour.result("tune")
    page.fill("#tune-text", "Too short.")
    visit.has("#tune-limit", "too short")
    assert page.locator("#tune-now").is_disabled()
    tour.took("a text that is too short")
    page.fill("#tune-text", TEXT)
    page.fill("#row-tokens", "64")
    page.fill("#budget", "3")
    visit.until("!document.querySelector('#tune-now').disabled")
    tour.took("a longer text")
    page.click("#tune-now")
    page.locator("#tuned > *").first.wait_for(timeout=SLOW_MS)
    assert page.locator("#tuned tbody tr").count(), page.inner_text("#tune")
    visit.until("document.querySelector('#tune .doing').textContent === ''")
    visit.until("document.querySelectorAll('#rows li[data-kind=tune]').length === 1")
    runs = json.loads((tour.out / ".studio/runs.json").read_text())
    run = next(run for run in runs if run["kind"] == "tune")
    page_of = (tour.out / f".studio/{run['id']}.html").read_text()
    for number in run["numbers"].values():
        assert number in page_of, "the list of runs and the report have one measure"
    losses = [float(text) for text in page.locator("#tuned tbody td.ws-n").all_inner_texts()]
    assert losses == sorted(losses)
    assert 1 < losses[0] < 12, "nats for a token, not for a row"
    tour.took("tune")
    tour.result("runs")
    page.locator("#rows li[data-kind=tune] button", has_text="Load").click()
    visit.until(f"document.querySelector('#text').value === {json.dumps(run['recipe'])}")
    tour.took("load what was found")
    tour.mixed(lambda: page.click("#undo"), "and the recipe before")


def returns(tour: Tour) -> None:
    """What is kept, and what is said when it is not."""
    visit, page = tour.visit, tour.page
    recipe = visit.recipe
    page.reload()
    visit.until(f"document.querySelector('#text').value === {json.dumps(recipe)}")
    visit.saved()
    tour.took("reload")
    tab = visit.tab()
    visit.until(f"document.querySelector('#text').value === {json.dumps(recipe)}", tab)
    tab.close()
    tour.took("another tab")
    before = resource.prlimit(tour.studio.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(tour.studio.process.pid, resource.RLIMIT_FSIZE, (16, before[1]))  # as on a disk without space
    visit.step("mix")
    visit.unfold()
    page.fill("#text", f"{recipe}# more\n")
    page.locator("#saved", has_text=re.compile("^Not saved: ")).wait_for()
    page.locator("#unsaved", has_text="is kept in this page").wait_for()
    resource.prlimit(tour.studio.process.pid, resource.RLIMIT_FSIZE, before)
    page.locator("#unsaved").wait_for(state="hidden")
    tour.took("a full disk, and space again")
    assert visit.recipe == f"{recipe}# more\n"
