"""The studio's page, open in Chromium."""

from __future__ import annotations

import time
from typing import Any

import yaml

SAVED = "document.querySelector('#saved').textContent === 'Saved'"
VALUES = """() => [...document.querySelectorAll(".ws-control")].map(each => {
  const numbers = [...each.querySelectorAll("input[type=number]")].map(input => Number(input.value));
  const points = [...each.querySelectorAll(".ws-hit")].map(hit => Number(hit.getAttribute("aria-valuenow")));
  const value = each.classList.contains("ws-layer") ? points : each.classList.contains("ws-part") ? numbers : numbers[0];
  return [each.dataset.model ?? "", each.dataset.name, value];
})"""
STATE = """['saved', 'why', 'progress', 'refused', 'dead']
  .map(id => `${id}: ${document.getElementById(id).innerText}`).join('\\n')"""
HEARD = """{
  const Source = EventSource;
  window.EventSource = class extends Source {
    constructor(...given) {
      super(...given);
      this.addEventListener("message", event => { window.heard = JSON.parse(event.data).studio?.id ?? window.heard; });
    }
  };
}"""
WAIT_MS = 60_000  # the machine may be busy
SLOW_MS = 300_000  # a busy machine that imports torch


class Visit:
    """An open page, its console messages, and its requests to other sites."""

    def __init__(self, browser: Any, address: str, width: int = 1440, height: int = 900, scheme: str = "light") -> None:
        self.address = address
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, has_touch=width < 500
        )
        self.context.add_init_script(HEARD)
        self.said: list[str] = []
        self.elsewhere: list[str] = []
        self.page = self.tab()

    def tab(self) -> Any:
        """One more tab of the same browser."""
        page = self.context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", self._request)
        page.goto(self.address)
        page.locator("#cards li, #found").first.wait_for()
        self.until(SAVED, page)
        return page

    def until(self, expression: str, page: Any = None) -> None:
        """Wait until JavaScript says so. The page's policy forbids Playwright's own way, which evaluates texts."""
        end = time.monotonic() + WAIT_MS / 1000
        while not (page or self.page).evaluate(expression):
            if time.monotonic() > end:
                words = (page or self.page).evaluate(STATE)
                raise AssertionError(f"{expression}\n{words}\n{self.said}")
            (page or self.page).wait_for_timeout(20)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.address.partition("?")[0], "data:", "blob:", "about:")):
            self.elsewhere.append(request.url)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *args: object) -> None:
        self.context.close()

    @property
    def heard(self) -> str:
        """The start of the studio that the page heard last: each has an id of its own."""
        text: str = self.page.evaluate("window.heard ?? ''")
        return text

    def step(self, name: str) -> None:
        """On a phone the three panes are three steps."""
        button = self.page.locator(f"#steps [data-step={name}]")
        if button.is_visible():
            button.click()

    def choose(self, ref: str, act: str = "add to the merge") -> None:
        """Press a button on a model's card."""
        self.step("models")
        self.page.click(f"[aria-label='{ref}: {act}']")

    def write(self, text: str) -> None:
        """The recipe, by hand."""
        self.step("mix")
        self.unfold()
        self.page.fill("#text", text)

    def unfold(self) -> None:
        """Open the recipe's text."""
        if not self.page.locator("#text").is_visible():
            self.page.click("#recipe > summary")

    @property
    def recipe(self) -> str:
        text: str = self.page.input_value("#text")
        return text

    def saved(self, page: Any = None) -> None:
        """Wait until the server has every edit, and the page shows what it has."""
        self.until(SAVED, page)

    def has(self, selector: str, text: str) -> None:
        """Wait until an element holds a text."""
        self.page.locator(selector, has_text=text).first.wait_for(state="attached")

    def previewed(self) -> None:
        """Wait until the preview is of the recipe that is shown."""
        self.saved()
        self.until(
            "!document.querySelector('#shown').classList.contains('old') && document.querySelector('#stale').textContent === ''"
        )

    def fine(self) -> None:
        """Nothing was said, asked of others, or run that a name brought; and nothing is wider than the page."""
        said = [text for text in self.said if "Failed to load resource" not in text]  # 409: refused
        assert not said, said
        assert not self.elsewhere, self.elsewhere
        assert self.page.evaluate("window.evil") is None
        assert not self.page.evaluate("document.documentElement.scrollWidth > innerWidth"), "something is wider than the page"
        wide = self.page.evaluate(
            "[...document.querySelectorAll('.pane, #board')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.id)"
        )
        assert not wide, f"something is wider than {wide}"


def values_shown(page: Any) -> dict[tuple[str, str], Any]:
    """What the controls show, by model and name: a number; those of a curve; those of parts."""
    values = page.evaluate(VALUES)
    return {(model, name): value for model, name, value in values}


def values_written(text: str) -> dict[tuple[str, str], Any]:
    """What a recipe says, in the same form."""
    recipe = yaml.safe_load(text)
    by_model = {}
    for entry in recipe["models"]:
        for name, value in (entry.get("parameters") or {}).items():
            parts = isinstance(value, list) and isinstance(value[0], dict)
            by_model[entry["model"], name] = [item["value"] for item in value] if parts else value
    return by_model
