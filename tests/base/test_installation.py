"""The command that adds a package fits the way in which the program was installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from weightsmith._base import installation


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    for function in (installation.installed_by, installation.installed_from):
        function.cache_clear()
    yield
    for function in (installation.installed_by, installation.installed_from):
        function.cache_clear()


def _installed(monkeypatch: pytest.MonkeyPatch, about: object, prefix: str = "/usr") -> None:
    text = None if about is None else json.dumps(about)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    monkeypatch.setattr(sys, "prefix", prefix)


@pytest.mark.parametrize(
    ("prefix", "extra", "package"),
    [
        ("/home/me/venv", "pip install 'weightsmith[torch]'", "pip install pyarrow"),
        (
            "/root/.local/share/pipx/venvs/weightsmith",
            "pipx install --force 'weightsmith[torch]'",
            "pipx inject weightsmith pyarrow",
        ),
        (
            "/root/.local/share/uv/tools/weightsmith",
            "uv tool install --force 'weightsmith[torch]'",
            "uv tool install weightsmith --with pyarrow",
        ),
    ],
)
def test_pip_pipx_and_uv(monkeypatch: pytest.MonkeyPatch, prefix: str, extra: str, package: str) -> None:
    _installed(monkeypatch, None, prefix)
    assert (installation.install("torch"), installation.install_package("pyarrow")) == (extra, package)


@pytest.mark.parametrize(
    ("origin", "installed", "release"),
    [
        (None, True, True),
        (None, False, False),  # a checkout on PYTHONPATH, beside a release
        ({"url": "https://github.com/org/weightsmith", "vcs_info": {"vcs": "git", "commit_id": "1" * 40}}, True, False),
        ({"url": "file:///tmp/weightsmith-0.1.0-py3-none-any.whl", "archive_info": {}}, True, False),
    ],
)
def test_a_release_is_what_an_index_has_sent(
    origin: object, installed: bool, release: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in ("site-packages", "src"):
        (tmp_path / place / "weightsmith").mkdir(parents=True)
    text = None if origin is None else json.dumps(origin)
    distribution = SimpleNamespace(read_text=lambda file: text, locate_file=lambda name: tmp_path / "site-packages" / name)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: distribution)
    assert installation.is_release(tmp_path / ("site-packages" if installed else "src") / "weightsmith") == release


def test_the_code_of_these_tests_is_no_release() -> None:
    assert not installation.is_release(Path(installation.__file__).parents[1])


def test_a_clone_and_a_wheel_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    _installed(monkeypatch, {"url": clone.as_uri(), "dir_info": {"editable": True}})
    assert installation.install("torch") == f"pip install -e '{clone}[torch]'"
    installation.installed_from.cache_clear()
    _installed(monkeypatch, {"url": clone.as_uri(), "dir_info": {}})
    assert installation.install("torch") == f"pip install '{clone}[torch]'"
    assert installation.reinstall() == f"pip install --force-reinstall '{clone}'"
    clone.rmdir()
    installation.installed_from.cache_clear()
    assert installation.install("torch") == "pip install 'weightsmith[torch]'"


@pytest.mark.parametrize("about", [[], {"url": 3}, {"url": "git+https://example.org/x"}, "text"])
def test_what_an_installer_has_written_may_be_anything(monkeypatch: pytest.MonkeyPatch, about: object) -> None:
    _installed(monkeypatch, about)
    assert installation.install("torch") == "pip install 'weightsmith[torch]'"


def test_no_other_module_says_how_to_install_a_package() -> None:
    sources = (path for path in Path(installation.__file__).parents[1].rglob("*") if path.suffix in (".py", ".js", ".html"))
    assert [str(path) for path in sources if "pip install" in path.read_text() and path.name != "installation.py"] == []
