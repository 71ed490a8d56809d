"""docs/images/report.png: the first screen of a report, drawn by Chromium from the models of the demo.

    make demo                               # once: the models, in build/demo
    python scripts/report_pictures.py       # needs playwright, and Chromium from the distribution

docs/images/routing.svg is the file of that name in the mixture of docs/gallery.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import weightsmith

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH, HEIGHT = 1120, 860


def main() -> None:
    """Compare the base with the French fine-tune, and photograph the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("build/demo/models"), help="folder with the demo's models")
    os.chdir(parser.parse_args().models)
    page = weightsmith.diff("base", "fr").report()
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = page.write(Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        shown.goto(path.as_uri())
        shown.screenshot(path=IMAGES / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
