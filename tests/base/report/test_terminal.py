"""A page on the terminal: facts and sentences whole, tables as wide as fits."""

from __future__ import annotations

import re

import pytest

from weightsmith._base.report.blocks import Cell, Column, Curves, Facts, HeatMap, Mark, Report, Table
from weightsmith._base.report.terminal import COLUMNS, ROWS

HEADS = (Column("part"), *(Column(f"column number {i}", "count") for i in range(7)))


def shown(page: Report, capsys: pytest.CaptureFixture[str], *, details: bool = False) -> list[str]:
    page.show(details=details)
    return capsys.readouterr().out.splitlines()


def test_facts_come_first_then_the_columns_that_fit_and_the_verdict_last(capsys: pytest.CaptureFixture[str]) -> None:
    facts = Facts("Models", (("A", "a\n\x1b[2Jb"), ("elements", "12")))
    row = ("q\x1b[2J", 1, *[2] * 6)
    lines = shown(Report("T", ("A sentence.",), (Curves("C", (), "x", "y"), Table("Parts", HEADS, (row,)), facts)), capsys)
    assert lines[:4] == ["A        a\\n\\x1b[2Jb", "elements 12", "", "parts"]
    assert re.split("  +", lines[4]) == ["part", *(f"column number {i}" for i in range(4))]
    assert lines[5].startswith("q\\x1b[2J ")
    assert lines[6:] == ["", "A sentence."]
    assert max(map(len, lines)) <= 80


def a_map(layers: int, *, group: str = "") -> HeatMap:
    numbers: list[Cell] = [i / (layers - 1) for i in range(layers)]
    marks = (*Mark, None)
    cells = (tuple(numbers), tuple(marks[i % len(marks)] for i in range(layers)))
    return HeatMap("Moved by A", ("up", "q" * 50), tuple(map(str, range(layers))), cells, "share", group=group)


def test_layers_are_characters_of_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(Report("T", ("All.",), (a_map(16),)), capsys)
    assert lines[1] == "moved by A"
    assert lines[2].split() == ["up", "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"]
    assert lines[3].split("  ")[-1] == "=·FHNIX+? =·FHNI"
    assert lines[4].strip() == "layer 0 to 15"
    assert lines[5] == "▁ to █: 0% to 100%"
    assert lines[6].startswith("= no element differs, · not applicable, F full rank")
    assert lines[-1] == "All."


def test_many_layers_go_on_below_and_nothing_is_wider_than_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(Report("T", ("All.",), (a_map(126),)), capsys)
    maps = lines[: next(i for i, line in enumerate(lines) if " to █" in line)]
    assert max(map(len, maps)) <= 80
    headings = [line.strip() for line in lines if line.strip().startswith("layer")]
    assert headings == ["layer 0 to 39", "layer 40 to 79", "layer 80 to 119", "layer 120 to 125"]
    assert sum(len(line.split()[1]) for line in lines if line.startswith("up ")) == 126


def test_maps_that_are_compared_are_shown_by_layer_with_a_row_for_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Curves("What survives", (("A", (0.0, 1.0)), ("B", (1.0, None))), "layer", "share", "share", first=0)
    text = "\n".join(shown(Report("T", (), (a_map(16, group="all"), lines)), capsys))
    assert "moved by A" not in text
    assert re.search(r"what survives\nA  ▁█\nB  █ ?\n +layer 0 to 1\n▁ to █: 0% to 100%", text)


def test_a_terminal_without_blocks_gets_digits_and_colour_is_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsmith._base.report.terminal._encodes", lambda: False)
    assert shown(Report("T", (), (a_map(8),)), capsys)[2].split() == ["up", "12345678"]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("weightsmith._base.text.is_terminal", lambda _stream: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31mN\x1b[0m" in "\n".join(shown(Report("T", (), (a_map(8),)), capsys))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in "\n".join(shown(Report("T", (), (a_map(8),)), capsys))


def test_the_first_columns_are_shown_though_they_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    heads = tuple(Column("x" * 30) for _ in range(COLUMNS + 1))
    lines = shown(Report("T", (), (Table("Wide", heads, (("1",) * len(heads),)),)), capsys)
    assert lines[-1].split() == ["1"] * COLUMNS


def test_tables_of_single_tensors_are_details_and_long_ones_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tuple((f"t{i}", i) for i in range(ROWS + 1_001))
    page = Report("T", (), (Table("Tensors", HEADS[:2], rows, name="tensors"), Table("Names", HEADS[:1], (("a",),))))
    assert shown(page, capsys) == []
    lines = shown(page, capsys, details=True)
    assert lines[-1] == "and 1,001 more"
    assert len(lines) == 2 + ROWS + 1


def test_a_column_of_the_terminals_width_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsmith._base.report.terminal.columns", lambda _stream: 200)
    lines = shown(Report("T", (), (Table("Parts", HEADS, (("q", *range(7)),)),)), capsys)
    assert lines[-1].split() == ["q", *map(str, range(7))]
