"""Chromium, for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The browser: the system's, or the one that Playwright has installed. The tests of pages are skipped if there is none."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    with sync_playwright() as playwright:
        installed = Path(playwright.chromium.executable_path).parents[2]
        # A launch that fails leaves folders in /tmp.
        if program is None and not any(installed.glob("chromium*")):
            pytest.skip("needs Chromium: make browser")
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()
