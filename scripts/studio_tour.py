"""Walk the two-minute path of docs/studio.md in Chromium, on the models of `make demo`, and take its pictures.

python scripts/studio_tour.py          the pictures of docs/images; and in docs/images/studio every step at 1440, 1024 and 390
                                       pixels, light and dark
python scripts/studio_tour.py --film   15 seconds from models to a merge, docs/images/studio.webp
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "build" / "demo" / "models"
IMAGES = ROOT / "docs" / "images"
SIZES = (1440, 900), (1024, 768), (390, 844)
WAIT_MS = 600_000
TEXT = "La bibliothèque est ouverte du lundi au samedi, et les lecteurs peuvent emprunter cinq livres à la fois."
PROMPT = "La ville de Lyon est"


@contextmanager
def studio(folder: Path) -> Iterator[str]:
    """The address of a studio of the demo's models."""
    log = folder / "log"
    command = [sys.executable, "-m", "weightsmith", "studio", "models", "--no-hub", "--port", "0"]
    with log.open("wb") as file, subprocess.Popen(command, cwd=folder, stdout=file, stderr=file) as process:
        try:
            while "Press Ctrl-C" not in log.read_text():
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.1)
            yield next(word for word in log.read_text().split() if word.startswith("http://"))
        finally:
            process.terminate()


class Waits:
    """What the page is waited for."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def until(self, expression: str) -> None:
        """JavaScript that becomes true."""
        end = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(expression):
            if time.monotonic() > end:
                raise SystemExit(f"it did not happen: {expression}")
            self.page.wait_for_timeout(50)

    def settled(self) -> None:
        """The server has every edit."""
        self.until("document.querySelector('#saved').textContent === 'Saved'")

    def previewed(self) -> None:
        """The preview is of the recipe that is shown."""
        self.settled()
        ready = (
            "!document.querySelector('#shown').classList.contains('old') && document.querySelector('#shown figure') !== null"
        )
        self.until(f"document.querySelector('#stale').textContent === '' && {ready}")


def walk(page: Any, take: Callable[[str, str], None]) -> None:
    """The path, step by step. take: called with the name of each, and of its pane."""
    waits = Waits(page)

    def step(name: str) -> None:
        if (button := page.locator(f"#steps [data-step={name}]")).is_visible():
            button.click()

    def press(name: str) -> None:
        step("models")
        page.click(f"[aria-label='{name}']")
        waits.settled()

    page.locator("#cards li").nth(3).wait_for(state="attached")
    press("./models/base: use as base")
    press("./models/fr: add to the merge")
    press("./models/py: add to the merge")
    waits.previewed()
    take("models", "models")
    step("result")
    page.click("#tab-find")
    take("find", "result")
    page.click("#tab-preview")
    step("mix")
    page.get_by_label("weight of ./models/fr: one value, by layer or by part").select_option("layer")
    page.get_by_label("weight of ./models/fr: shape").select_option("rising")
    waits.settled()
    page.locator(".ws-hit").first.focus()
    for _ in range(3):
        page.keyboard.press("PageUp")
    waits.previewed()
    take("mix", "mix")
    step("result")
    page.click("#tab-try")
    page.fill("#prompt", PROMPT)
    page.fill("#judged", TEXT)
    page.click("#try-now")
    page.locator("#tried tbody tr").nth(3).wait_for()
    take("try", "result")
    page.fill("#name", "fr-py")
    page.click("#merge")
    page.locator("#progress", has_text="Done").wait_for()
    step("result")
    page.frame_locator("#frame iframe").locator("h1").wait_for()
    page.wait_for_timeout(500)
    take("merged", "result")


# ---- the film

FILM_SIZE = (1280, 720)
FILM_MS = 15_000
"""Without the first and the last frame, which stay longer."""
POINTER = """
  const pointer = document.createElement("div");
  pointer.id = "pointer";
  pointer.style.cssText = "position:fixed;left:0;top:0;z-index:99;pointer-events:none;transform:translate(900px,560px)";
  const path = '<path d="M4 2l15 11-7 1 4 7-3 1-4-7-5 5z" fill="#111" stroke="#fff" stroke-width="1.5"/>';
  pointer.innerHTML = `<svg width="22" height="22" viewBox="0 0 24 24">${path}</svg>`;
  document.body.append(pointer);
"""


class Film:
    """Frames of a page, each with the milliseconds that it is shown, and a pointer that moves between them."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.frames: list[tuple[bytes, int]] = []
        self._at = (900.0, 560.0)
        page.evaluate(f"() => {{ {POINTER} }}")

    def hold(self, milliseconds: int) -> None:
        """One frame."""
        self.frames.append((self.page.screenshot(), milliseconds))

    def move(self, x: float, y: float, steps: int = 4) -> None:
        """Move the pointer there, slower at the ends."""
        begin = self._at
        for i in range(1, steps + 1):
            share = i / steps
            share = share * share * (3 - 2 * share)
            self._at = begin[0] + (x - begin[0]) * share, begin[1] + (y - begin[1]) * share
            place = f"translate({self._at[0]:.0f}px,{self._at[1]:.0f}px)"
            self.page.evaluate(f"() => {{ document.getElementById('pointer').style.transform = '{place}' }}")
            self.hold(60)

    def to(self, selector: str) -> None:
        """Move the pointer to an element."""
        box = self.page.locator(selector).first.bounding_box()
        self.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)

    def click(self, selector: str) -> None:
        """Move the pointer to an element, and press it."""
        self.to(selector)
        self.page.locator(selector).first.click()
        self.page.wait_for_timeout(300)
        self.hold(350)

    def write(self, path: Path) -> None:
        """As an animated WebP, below 1.5 MB."""
        from PIL import Image

        images = [Image.open(io.BytesIO(data)).convert("RGB") for data, _ in self.frames]
        shown = [milliseconds for _, milliseconds in self.frames]
        options: dict[str, Any] = {"save_all": True, "append_images": images[1:], "duration": shown, "loop": 0}
        images[0].save(path, quality=85, method=4, minimize_size=True, **options)
        print(f"{path.relative_to(ROOT)}: {sum(shown) / 1000:.1f} s, {len(images)} frames, {path.stat().st_size:,} bytes")


def film(page: Any, path: Path) -> None:
    """From the models to a merge, in about 15 seconds."""
    page.locator("#cards li").nth(3).wait_for(state="attached")
    steps = Waits(page)
    one = Film(page)
    one.hold(1500)
    one.click("[aria-label='./models/base: use as base']")
    one.click("[aria-label='./models/fr: add to the merge']")
    one.click("[aria-label='./models/py: add to the merge']")
    steps.previewed()
    one.hold(2000)
    slider = page.get_by_label("weight of ./models/py", exact=True)
    box = slider.bounding_box()
    middle = box["y"] + box["height"] / 2
    one.move(box["x"] + box["width"] * float(slider.evaluate("e => (e.value - e.min) / (e.max - e.min)")), middle)
    for _ in range(8):
        for _ in range(6):
            slider.press("ArrowLeft")
        page.wait_for_timeout(60)
        one.move(box["x"] + box["width"] * float(slider.evaluate("e => (e.value - e.min) / (e.max - e.min)")), middle, 1)
    steps.previewed()
    one.hold(2500)
    one.to("#name")
    page.fill("#name", "")
    for letter in "fr-py":
        page.locator("#name").press_sequentially(letter)
        one.hold(90)
    steps.until("!document.querySelector('#merge').disabled")
    one.click("#merge")
    last = 0.0
    done = page.locator("#progress", has_text="Done")
    while not done.is_visible():
        if time.monotonic() > last + 1 and page.locator("#progress .ws-bar").is_visible():
            last = time.monotonic()
            if sum(shown for _, shown in one.frames) < FILM_MS - 3000:
                one.hold(250)
        page.wait_for_timeout(50)
    page.frame_locator("#frame iframe").locator("h1").wait_for()
    page.wait_for_timeout(800)
    one.hold(4000)
    one.write(path)


def main() -> None:
    """Take the pictures."""
    from playwright.sync_api import sync_playwright

    if not MODELS.is_dir():
        raise SystemExit("the models are not there -> run make demo first")
    filmed = "--film" in sys.argv[1:]
    programs = "chromium", "chromium-headless-shell", "google-chrome"
    program = next(filter(None, map(shutil.which, programs)), None)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as name, studio_of(Path(name)) as address:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_context(viewport=_size(FILM_SIZE if filmed else SIZES[0]), color_scheme="light").new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(address)
        if filmed:
            film(page, IMAGES / "studio.webp")
        else:
            walk(page, lambda step, pane: pictures(page, step, pane))
        browser.close()


def _size(size: tuple[int, int]) -> Any:
    return {"width": size[0], "height": size[1]}


def pictures(page: Any, step: str, pane: str) -> None:
    """A step at each size, light and dark: the first of docs/images, all of docs/images/studio."""
    picture(page, IMAGES / f"studio-{step}.png")
    for width, height in SIZES:
        page.set_viewport_size(_size((width, height)))
        if (button := page.locator(f"#steps [data-step={pane}]")).is_visible():
            button.click()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(300)
            picture(page, IMAGES / "studio" / f"studio-{step}-{width}-{scheme}.png")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(_size(SIZES[0]))
    page.wait_for_timeout(300)


@contextmanager
def studio_of(folder: Path) -> Iterator[str]:
    """A studio beside links to the models."""
    (folder / "models").mkdir()
    for model in ("base", "fr", "de", "py"):
        shutil.copytree(MODELS / model, folder / "models" / model, copy_function=lambda a, b: Path(b).hardlink_to(a))
    with studio(folder) as address:
        yield address


def picture(page: Any, path: Path) -> None:
    """Take one, with few colours: it is a fifth of the size."""
    page.screenshot(path=path)
    try:
        from PIL import Image
    except ImportError:
        return
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
