"""A first-time user whose server is killed at every step, or whose disk is full, read-only or gone.

The page never says "Saved" of what is not on the disk, and nothing runs for ever. What happened, what is kept and what to press
is said. Once the server is back the page goes on.
"""

from __future__ import annotations

import json
import random
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.app.studio.serving import Studio, start, stop
from tests.app.studio.slow_link import Link, slow_link
from tests.app.studio.visit import Visit
from tests.browser_help import browser

__all__ = ["browser"]

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.sweep]
FRENCH, GERMAN = "./out/demo/french", "./out/demo/german"
PROBLEMS = "document.querySelector('#why').textContent.includes('problem')"
NOT_RUNNING = "[...document.querySelectorAll('.doing')].every(each => each.textContent === '')"


class Killed:
    """A user whose server is killed, again and again.

    link   what the page talks to: it stays while servers come and go
    edits  share of the edits at which it is killed; at all else it always is
    words  what the page said of each step that was killed
    """

    def __init__(self, visit: Visit, studio: Studio, link: Link, root: Path, edits: float) -> None:
        self.visit, self.page, self.studio, self.link, self.root = visit, visit.page, studio, link, root
        self.edits = edits
        self.chance = random.Random(7)
        self.words: dict[str, str] = {}

    def edit(self, name: str, act: Callable[[], object]) -> None:
        """An edit, and perhaps a kill."""
        self.visit.step("mix")
        if self.chance.random() < self.edits:
            self.step(name, act)
        else:
            act()
            self.agrees(name)

    def step(self, name: str, act: Callable[[], object], *, dead: bool = False) -> None:
        """Kill the server just after an action. dead: wait until the page has noticed."""
        act()
        self.page.wait_for_timeout(self.chance.choice((0, 0, 10, 50, 150)))
        self.studio.kill()
        if dead:
            self.page.locator("#dead", has_text="your recipe is kept").wait_for()
            self.silent(name)
        before = self.visit.heard
        self.studio = start(self.root, out="out", port=self.studio.port)
        self.visit.until(f"window.heard !== {json.dumps(before)}")  # what the page says is of the new server
        self.page.locator("#dead").wait_for(state="hidden")
        self.agrees(name)

    def silent(self, name: str) -> None:
        """While there is no server, nothing is said to be saved or to run."""
        assert self.page.inner_text("#saved") == "Not connected", name
        why, progress = self.page.locator("#why").text_content() or "", self.page.inner_text("#progress")
        assert "does not answer" in why or "No news" in progress, name
        for doing in self.page.locator(".doing").all():
            assert (doing.text_content() or "No news").startswith("No news"), f"{name}: it may run no longer"
        assert self.page.locator("button.stop:visible").count() == 0, name

    def agrees(self, name: str) -> None:
        """The page has what the disk has, and does not wait for what was killed."""
        self.visit.saved()
        kept = self.root / "out" / ".studio" / "recipe.json"
        self.visit.until("document.querySelector('#dead').hidden")
        assert (json.loads(kept.read_text())["text"] if kept.exists() else "") == self.visit.recipe, (
            f"{name}: Saved, and is not"
        )
        self.visit.until(NOT_RUNNING)
        self.visit.until("!document.querySelector('#progress').textContent.includes('merging')")
        self.page.locator("#cancel").wait_for(state="hidden")
        if self.visit.recipe.strip():
            self.visit.until("!document.querySelector('#why').textContent.includes('Checking')")
        self.words[name] = " ".join(self.page.locator("#progress, #refused").all_text_contents()).strip()


@contextmanager
def visiting(browser: Any, root: Path, width: int, seconds: float) -> Iterator[Killed]:
    (root / "models").mkdir()
    studio = start(root, out="out")
    with slow_link(studio.port) as link, Visit(browser, f"http://127.0.0.1:{link.port}/", width) as visit:
        link.seconds = seconds
        user = Killed(visit, studio, link, root, 0.3 if seconds or width < 1440 else 1.0)
        try:
            yield user
        finally:
            stop(user.studio)


def ready(user: Killed) -> None:
    """The demo's models, and a recipe of them."""
    user.visit.step("mix")
    user.page.click("#example")
    user.visit.has("#strips", "/demo/french")
    user.visit.until("!document.querySelector('#merge').disabled")


@pytest.mark.timeout(900)  # a server is started thirty times
@pytest.mark.parametrize(("width", "seconds"), [(1440, 0.0), (390, 0.0)])
def test_the_server_is_killed_at_each_step(browser: Any, tmp_path: Path, width: int, seconds: float) -> None:
    with visiting(browser, tmp_path.resolve(), width, seconds) as user:
        visit, page = user.visit, user.page
        user.step("open", lambda: None, dead=True)
        visit.step("mix")
        user.step("example", lambda: page.click("#example"))
        if not visit.recipe:
            ready(user)
        weight = page.get_by_label(f"weight of {FRENCH}", exact=True)

        visit.step("mix")
        weight.focus()
        user.step("slider", lambda: [page.keyboard.press("ArrowLeft") for _ in range(3)], dead=True)
        assert page.get_by_label(f"weight of {FRENCH}", exact=True).input_value() == "0.97"
        user.edit("goal", lambda: page.select_option("#goal", "average"))
        user.edit("comment", lambda: visit.write(f"# mine\n{visit.recipe}"))
        assert visit.recipe.startswith("# mine\n")
        good = visit.recipe
        user.edit("slip", lambda: visit.write(good.replace("merge_method: ", "merge_method: x")))
        visit.has("#why", "1 problem")
        user.edit("mend", lambda: visit.write(good))
        assert visit.recipe == good
        user.edit("remove", lambda: visit.choose(GERMAN, "remove from the merge"))
        assert "german" not in visit.recipe
        user.edit("add", lambda: visit.choose(GERMAN))
        assert "german" in visit.recipe
        visit.until("!document.querySelector('#merge').disabled")
        visit.step("models")
        user.step("compare", lambda: page.click("#look"), dead=True)
        visit.step("result")
        page.click("#tab-sweep")
        page.fill("#values", "0.2, 0.8")
        visit.until("!document.querySelector('#sweep-now').disabled")
        user.step("sweep", lambda: page.click("#sweep-now"))
        for i in range(2):
            page.fill("#name", f"mine{i}")
            visit.until("!document.querySelector('#merge').disabled")
            user.step(f"merge {i}", lambda: page.click("#merge"), dead=i == 0)
            words = user.words[f"merge {i}"]
            result = (tmp_path / "out" / f"mine{i}").exists()
            if result:
                assert "is merged" in words or "Done" in words, words
            else:
                assert re.search("interrupted|[Pp]ress the button again", words), words
        page.fill("#name", "whole")
        visit.until("!document.querySelector('#merge').disabled")
        page.click("#merge")
        visit.has("#progress", "Done")
        visit.fine()


# ---- a disk that takes nothing


@contextmanager
def full(studio: Studio, out: Path) -> Iterator[None]:
    """No file of the server takes more than a few bytes, as on a disk without space."""
    most = resource.prlimit(studio.process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(studio.process.pid, resource.RLIMIT_FSIZE, (16, most))
    yield  # the server is killed


@contextmanager
def gone(studio: Studio, out: Path) -> Iterator[None]:
    """The folder of the results is deleted, with the models in it, and cannot be made again."""
    away = out.with_name("away")
    out.rename(away)
    out.write_text("no folder")
    yield
    out.unlink()
    away.rename(out)


@pytest.mark.parametrize("refusing", [full, gone])
@pytest.mark.parametrize("width", [1440, 390])
def test_a_disk_that_takes_nothing(browser: Any, tmp_path: Path, refusing: Any, width: int) -> None:
    root = tmp_path.resolve()
    with visiting(browser, root, width, 0.0) as user:
        visit, page, out = user.visit, user.page, root / "out"
        ready(user)
        visit.previewed()
        visit.saved()
        before = json.loads((out / ".studio" / "recipe.json").read_text())["text"]
        with refusing(user.studio, out):
            visit.write(f"{before}# more\n")
            page.locator("#saved", has_text=re.compile("^Not saved: ")).wait_for()
            page.locator("#unsaved", has_text="is kept in this page").wait_for()
            visit.step("result")
            page.fill("#name", "mine")
            visit.until(f"!document.querySelector('#merge').disabled || {PROBLEMS}")
            if page.locator("#merge").is_enabled():
                page.click("#merge")
                page.locator("#progress .ws-bad, #refused .ws-error, #refused p").first.wait_for()
                assert "Done" not in page.inner_text("#progress")
                said = page.inner_text("#refused")
                assert re.search("space|folder|File too large|File exists|Not a directory", said), said
                page.click("#refused >> text=Close")
            visit.until(NOT_RUNNING)
            assert page.inner_text("#saved").startswith("Not saved: ")
            # The server ends before the disk takes the recipe: this page alone has it.
            user.studio.kill()
            page.locator("#dead").wait_for()
        assert json.loads((out / ".studio" / "recipe.json").read_text())["text"] == before
        user.studio = start(root, out="out", port=user.studio.port)
        page.locator("#dead").wait_for(state="hidden")
        visit.until(f"document.querySelector('#text').value === {json.dumps(before + '# more' + chr(10))}")
        user.agrees("after")
        assert visit.recipe == f"{before}# more\n"
        page.locator("#unsaved").wait_for(state="hidden")
        visit.until("!document.querySelector('#merge').disabled")
        page.click("#merge")
        visit.has("#progress", "Done")
        assert not (out / "mine").is_symlink()
        visit.fine()
