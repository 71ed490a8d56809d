"""Plug-ins: weightsmith's own by name, those of installed packages by entry point."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from weightsmith._base.errors import PluginError, UnknownName
from weightsmith._base.plugins import Plugins, installed

GROUP = "weightsmith.test_fractions"
HALF = Fraction(1, 2)
WORDS = "a half"
OWN = {"half": "tests.base.test_plugins:HALF", "words": "tests.base.test_plugins:WORDS"}
FRACTIONS = Plugins("fraction", GROUP, Fraction, OWN)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with plug-ins that work and some that do not; its module."""
    info = tmp_path / "thirds-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirds\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\nthird = thirds_pkg:THIRD\nhalf = thirds_pkg:THIRD\nnumber = thirds_pkg:NUMBER\nlost = thirds_pkg:lost\n"
    )
    module = tmp_path / "thirds_pkg.py"
    module.write_text("from fractions import Fraction\nTHIRD = Fraction(1, 3)\nNUMBER = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "thirds_pkg", raising=False)
    installed.cache_clear()
    yield module
    installed.cache_clear()


def test_own_plugins_are_found_by_name() -> None:
    assert FRACTIONS.get("half") is HALF
    assert FRACTIONS.names == ("half", "words")
    assert "half" in FRACTIONS
    assert "third" not in FRACTIONS


def test_a_plugin_of_an_installed_package_is_found_by_its_entry_point(package: Path) -> None:
    assert FRACTIONS.get("third") == Fraction(1, 3)
    assert FRACTIONS.names == ("half", "words", "third", "number", "lost")
    assert "third" in FRACTIONS


def test_a_package_cannot_replace_a_plugin_of_ours(package: Path) -> None:
    assert FRACTIONS.get("half") is HALF


def test_an_unknown_name_is_an_error_with_the_nearest(package: Path) -> None:
    with pytest.raises(UnknownName, match=r"there is no fraction 'thrid' \(did you mean 'third'\?\)"):
        FRACTIONS.get("thrid")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "thirds 1.0: the fraction number is a int, not a Fraction"),
        ("lost", "thirds 1.0: the fraction lost cannot be loaded: AttributeError"),
        ("words", "tests.base.test_plugins:WORDS: the fraction words is a str, not a Fraction"),
    ],
)
def test_a_plugin_that_does_not_work_is_an_error_that_names_its_package(package: Path, name: str, message: str) -> None:
    with pytest.raises(PluginError) as caught:
        FRACTIONS.get(name)
    assert message in str(caught.value)


def test_the_identity_of_an_installed_plugin_is_its_package_and_its_code(package: Path) -> None:
    first = FRACTIONS.identity("third")
    assert first.startswith("thirds 1.0 ")
    package.write_text(package.read_text() + "# changed\n")
    assert FRACTIONS.identity("third") != first
    assert FRACTIONS.identity("half") == ""
