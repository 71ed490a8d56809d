"""Models are made once, and again when what makes them is another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import made_once, zoo


@pytest.fixture
def built_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where models are made; none is kept yet."""
    monkeypatch.setattr(made_once, "KEPT", tmp_path / "kept")
    return []


def test_a_model_is_made_once_for_the_same_versions_question_and_code(
    tmp_path: Path, built_folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(str(len(built_folders)))
        built_folders.append(folder)

    source = tmp_path / "source.py"

    def ask(question: object, code: str = "") -> str:
        source.write_text(code)
        made_once.made_once(tmp_path / "out", str(source), question, make)
        return (tmp_path / "out/config.json").read_text()

    assert [ask("a"), ask("a"), ask("b"), ask("a", "# other"), ask("a")] == ["0", "0", "1", "2", "0"]
    monkeypatch.setattr(made_once, "version", lambda _package: "9.9")
    assert ask("a") == "3"
    assert len([*(tmp_path / "kept").iterdir()]) == 4


def test_a_kept_model_is_the_one_that_is_made(tmp_path: Path, built_folders: list[Path]) -> None:
    first, second = (zoo.save("llama", tmp_path / name, 3) for name in "ab")
    other = zoo.save("llama", tmp_path / "c", 4)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, second, other)]
    assert weights[0] == weights[1] != weights[2]
    (first / "config.json").write_text("{}")  # a copy
    assert (zoo.save("llama", tmp_path / "d", 3) / "config.json").read_text() != "{}"
