"""What transformers said is kept in small files, which may be missing, damaged or many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from weightsmith._planning.planner import loading
from weightsmith._planning.planner.loading import find_answer, keep_answer

SAID: dict[str, Any] = {"differences": [["missing", "x", ""]]}
key_of = loading.key_of  # tests/conftest.py takes its place


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "weightsmith" / "loading"


def test_an_answer_is_found_again_and_no_other() -> None:
    keep_answer("a", SAID)
    assert find_answer("a") == SAID
    assert find_answer("b") is None


def test_a_question_is_another_with_another_script_or_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("1")
    packages = ("numpy", "pytest")

    def key() -> str:
        return key_of("question", script, packages)

    first = key()
    assert first == key()
    assert first != key_of("another", script, packages)
    script.write_text("2")
    assert first != key()
    script.write_text("1")
    monkeypatch.setattr(loading.metadata, "version", lambda name: f"{name} 9")
    assert first != key()
    monkeypatch.setattr(loading.metadata, "version", lambda _name: "9.0.dev0")
    assert key() == ""
    monkeypatch.setattr(loading.metadata, "version", lambda _name: None)
    assert key() == ""
    monkeypatch.undo()
    assert key_of("question", script, ("no such package",)) == ""


@pytest.mark.parametrize(
    "answer", [{"failed": "no memory"}, {"unknown": "x"}, {"differences": [["missing", "x" * 99, ""]] * 9999}]
)
def test_what_may_change_or_is_long_is_not_kept(answer: dict[str, Any], folder: Path) -> None:
    keep_answer("a", answer)
    keep_answer("", SAID)
    assert not folder.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"differences": [["x"]]}', '{"differences": {}}', '{"failed": "x"}', "[" * 9999, "\udcff"]
)
def test_a_damaged_file_is_no_answer(text: str, folder: Path) -> None:
    keep_answer("a", SAID)
    (folder / "a.json").write_text(text, errors="surrogateescape")
    assert find_answer("a") is None


def test_the_oldest_files_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MAX_ANSWERS", 2)
    for i, key in enumerate("abc"):
        keep_answer(key, SAID)
        os.utime(folder / f"{key}.json", (i, i))
    keep_answer("d", SAID)
    assert [find_answer(key) is not None for key in "abcd"] == [False, False, True, True]


def test_a_folder_that_cannot_be_made_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    keep_answer("a", SAID)
    assert find_answer("a") is None
