"""A page on the terminal: facts and sentences whole, tables as wide as fits."""

from __future__ import annotations

import re

import pytest

from weightsmith._base.pages import Column, Curves, Facts, Page, Table
from weightsmith._base.pages.terminal import COLUMNS, ROWS, show_page

HEADS = (Column("part"), *(Column(f"column number {i}", "count") for i in range(7)))


def shown(page: Page, capsys: pytest.CaptureFixture[str], *, details: bool = False) -> list[str]:
    show_page(page, details=details)
    return capsys.readouterr().out.splitlines()


def test_facts_come_first_then_sentences_then_the_columns_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    facts = Facts("Models", (("A", "a\n\x1b[2Jb"), ("elements", "12")))
    row = ("q\x1b[2J", 1, *[2] * 6)
    lines = shown(Page("T", ("A sentence.",), (facts, Curves("C", (), "x", "y"), Table("Parts", HEADS, (row,)))), capsys)
    assert lines[:4] == ["A        a\\n\\x1b[2Jb", "elements 12", "", "A sentence."]
    assert lines[4:6] == ["", "parts"]
    assert re.split("  +", lines[6]) == ["part", *(f"column number {i}" for i in range(4))]
    assert lines[7].startswith("q\\x1b[2J ")
    assert len(lines) == 8
    assert max(map(len, lines)) <= 80


def test_the_first_columns_are_shown_though_they_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    heads = tuple(Column("x" * 30) for _ in range(COLUMNS + 1))
    lines = shown(Page("T", (), (Table("Wide", heads, (("1",) * len(heads),)),)), capsys)
    assert lines[-1].split() == ["1"] * COLUMNS


def test_tables_of_single_tensors_are_details_and_long_ones_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tuple((f"t{i}", i) for i in range(ROWS + 1_001))
    page = Page("T", (), (Table("Tensors", HEADS[:2], rows, name="tensors"), Table("Names", HEADS[:1], (("a",),))))
    assert shown(page, capsys) == []
    lines = shown(page, capsys, details=True)
    assert lines[-1] == "and 1,001 more"
    assert len(lines) == 3 + ROWS + 1


def test_a_column_of_the_terminals_width_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._base.pages.terminal.columns", lambda _stream: 200)
    lines = shown(Page("T", (), (Table("Parts", HEADS, (("q", *range(7)),)),)), capsys)
    assert lines[-1].split() == ["q", *map(str, range(7))]
