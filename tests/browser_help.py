"""Chromium, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

OPT_OUT = "WEIGHTSMITH_TESTS_WITHOUT_BROWSER"
_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The browser. A test fails where there is none, unless the environment says that there is to be none."""
    if os.environ.get(OPT_OUT):
        pytest.skip(f"{OPT_OUT} is set")
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.fail(f"no Chromium is installed: run make browser, or set {OPT_OUT}=1 to leave out the tests of pages")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()
