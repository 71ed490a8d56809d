"""Walk the two-minute path of docs/studio.md in Chromium, on the models of `make demo`, and take its pictures.

python scripts/studio_tour.py          the pictures of docs/images
python scripts/studio_tour.py --all    every step at 1440, 1024 and 390 pixels, light and dark, in docs/images/studio;
                                       --all 390: at this width alone
"""

from __future__ import annotations

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


def walk(page: Any, take: Callable[[str], None]) -> None:
    """The path, step by step. take: called with the name of each."""

    def step(name: str) -> None:
        if (button := page.locator(f"#steps [data-step={name}]")).is_visible():
            button.click()

    def press(name: str) -> None:
        step("models")
        page.click(f"[aria-label='{name}']")
        settled()

    def until(expression: str) -> None:
        end = time.monotonic() + WAIT_MS / 1000
        while not page.evaluate(expression):
            if time.monotonic() > end:
                raise SystemExit(f"it did not happen: {expression}")
            page.wait_for_timeout(50)

    def settled() -> None:
        until("document.querySelector('#saved').textContent === 'Saved'")

    def previewed() -> None:
        settled()
        until("!document.querySelector('#shown').classList.contains('old') && document.querySelector('#shown figure') !== null")

    page.locator("#cards li").nth(3).wait_for(state="attached")
    press("./models/base: use as base")
    press("./models/fr: add to the merge")
    press("./models/py: add to the merge")
    previewed()
    take("models")
    step("mix")
    page.get_by_label("weight of ./models/fr: one value, by layer or by part").select_option("layer")
    page.get_by_label("weight of ./models/fr: shape").select_option("rising")
    settled()
    page.locator(".ws-hit").first.focus()
    for _ in range(3):
        page.keyboard.press("PageUp")
    previewed()
    take("mix")
    step("result")
    page.click("#tab-try")
    page.fill("#prompt", PROMPT)
    page.fill("#judged", TEXT)
    page.click("#try-now")
    page.locator("#tried tbody tr").nth(3).wait_for()
    take("try")
    page.fill("#name", "fr-py")
    page.click("#merge")
    page.locator("#progress", has_text="Done").wait_for()
    step("result")
    page.frame_locator("#frame iframe").locator("h1").wait_for()
    page.wait_for_timeout(500)
    take("merged")


def main() -> None:
    """Take the pictures."""
    from playwright.sync_api import sync_playwright

    if not MODELS.is_dir():
        raise SystemExit("the models are not there -> run make demo first")
    every, widths = "--all" in sys.argv[1:], {int(word) for word in sys.argv[1:] if word.isdecimal()}
    target = ROOT / "docs" / "images" / ("studio" if every else "")
    target.mkdir(parents=True, exist_ok=True)
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)
    sizes = [(1440, 900), (1024, 768), (390, 844)] if every else [(1440, 900)]
    sizes = [size for size in sizes if not widths or size[0] in widths]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width, height in sizes:
            for scheme in ("light", "dark") if every else ("light",):
                with tempfile.TemporaryDirectory() as name, studio_of(Path(name)) as address:
                    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
                    page.set_default_timeout(WAIT_MS)
                    page.goto(address)
                    suffix = f"-{width}-{scheme}" if every else ""
                    walk(page, lambda step, page=page, suffix=suffix: picture(page, target / f"studio-{step}{suffix}.png"))
        browser.close()


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
