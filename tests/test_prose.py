"""scripts/prose.py finds what it should. `make lint` runs it on the project."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.script_help import load

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[1]


def script() -> ModuleType:
    return load(ROOT / "scripts" / "prose.py")


def phrases(text: str) -> list[str]:
    return [problem.phrase.strip() for problem in script().problems(script().Text("a.md", 1, text))]


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("Of a merge of adapters: the largest rank of the result.", "Of a merge of adapters:"),
        ("Show what model B differs in from model A.", "what model B differs in"),
        ("and in words what that probably means", "what that probably means"),
        ("5GB if not given.", "if not given"),
        ("Put a value into the recipe; may be given several times.", "may be given several times"),
        ("Bound of memory, bound of one weight file.", "bound of"),
        ("nothing is stored but a bounded spool", "spool"),
        ("Only the bytes that the command needs travel.", "travel"),
        ("First, the storage ends it.", "ends it"),
        ("Other flags are answered.", "are answered"),
        ("Last come the rows that moved most.", "Last come"),
        ("It does so, but for the random masks.", "but for"),
        ("has learned its examples by heart", "by heart"),
        ("Models elsewhere", "Models elsewhere"),
        ("A reading is an inference from numbers.", "A reading"),
        ("Models on the hub are downloaded.", "the hub"),
        ("A folder or a hub id.", "hub id"),
        ("The tokeniser of the model.", "tokeniser"),
    ],
)
def test_a_phrase_that_reads_as_translated_is_found(text: str, phrase: str) -> None:
    assert phrase.lower() in [match.lower() for match in phrases(text)]


def test_a_long_sentence_is_found_and_two_short_ones_are_not() -> None:
    words = "word " * 20
    assert len(phrases(f"{words}and {words}end.")) == 1
    assert phrases(f"{words}end. And {words}end.") == []


def test_code_and_addresses_are_not_read() -> None:
    assert phrases("Use `--stream-cache`, and [the page](what-travels.md).") == []
    assert phrases("`if not given` is a phrase.") == []
    assert phrases("--quantize FORMAT, or weightsmith quantize --list") == []
    assert phrases(f"{'name, ' * 31}last") == []
    assert len(phrases(f"{'name, ' * 31}and quantize")) == 2


def test_a_page_is_read_by_paragraph_entry_and_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script(), "ROOT", tmp_path)
    page = tmp_path / "a.md"
    page.write_text("# Title\n\nTwo\nlines.\n\n* One\n  entry.\n* Two.\n\n| a | b |\n\n```text\nif not given\n```\n")
    texts = [(part.line, part.text) for part in script().page_texts(page)]
    assert texts == [(1, "Title"), (3, "Two lines."), (6, "One entry."), (8, "Two."), (10, "a"), (10, "b")]


@pytest.mark.slow
def test_messages_help_texts_and_public_docstrings_are_read() -> None:
    texts = list(script().source_texts())
    places = {part.place for part in texts}
    assert "src/weightsmith/_execution/options.py" in places
    assert any(part.text == "Number of threads" for part in texts), "a help text"
    assert any("no such folder or file" in part.text for part in texts), "a message"
    assert any(part.text.startswith("Merge checkpoints into a new folder") for part in texts), "a docstring"
