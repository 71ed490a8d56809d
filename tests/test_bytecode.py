"""Collecting the tests is cheap where PYTHONDONTWRITEBYTECODE is set, too."""

from __future__ import annotations

import sys


def test_rewritten_test_modules_are_kept() -> None:
    assert not sys.dont_write_bytecode
