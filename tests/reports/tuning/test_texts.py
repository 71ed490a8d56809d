"""Rows to tune on and rows of the report: split, cut, and apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weightsmith._base.errors import PlanError
from weightsmith._planning.options import RecipeOptions
from weightsmith._reports.evaluate.opening import Opened, opened
from weightsmith._reports.tuning.candidates import Candidates
from weightsmith._reports.tuning.texts import NARROWEST, Texts, fit, read_texts


@pytest.fixture
def read(work: Path):  # type: ignore[no-untyped-def]
    with Candidates("r.yml", RecipeOptions()) as recipe:
        one: Opened = opened("r.yml", recipe.prepare(recipe.start))

        def read(*texts: str, report: tuple[str, ...] = (), rows: int | None = None, tokens: int = 32) -> Texts:
            return read_texts(one, texts, report, rows, tokens)

        yield read


def test_a_text_is_split_by_rows(read) -> None:  # type: ignore[no-untyped-def]
    split = read("t.txt", "u.txt", rows=9)
    assert [len(rows.ids) for rows in split.tune] == [6, 6]
    assert [len(rows.ids) for rows in split.report] == [3, 3]
    assert split.report_names == ("t.txt", "u.txt")
    whole = read("t.txt", report=("u.txt",), rows=9)
    assert np.array_equal(np.concatenate([split.tune[0].ids, split.report[0].ids]), whole.tune[0].ids)
    assert [len(rows.ids) for rows in read("t.txt").tune] == [16]


def test_texts_that_share_rows_are_an_error_wherever_they_begin(read) -> None:  # type: ignore[no-untyped-def]
    text = Path("t.txt").read_text()
    Path("same.txt").write_text(text[:400])
    Path("moved.txt").write_text("A few words first. " + text[:400])
    Path("other.txt").write_text(text[560:])
    for name in ("same.txt", "moved.txt"):
        with pytest.raises(PlanError, match=rf"rows of {name} for the report are in the rows of t.txt to tune on too"):
            read("t.txt", report=(name,), rows=16)
    read("t.txt", report=("other.txt",), rows=16)
    Path("twice.txt").write_text(text[:900] * 2)
    with pytest.raises(PlanError, match=r"rows of twice.txt for the report are in the other rows of twice.txt"):
        read("twice.txt", rows=48)


def test_a_text_that_is_too_short_is_an_error(read) -> None:  # type: ignore[no-untyped-def]
    Path("short.txt").write_text("too short to be split")
    with pytest.raises(PlanError, match=r"short.txt: the text has 1 row of 32 tokens, and 4 are needed"):
        read("short.txt")
    Path("empty.txt").write_text("")
    with pytest.raises(PlanError, match="it has fewer than two tokens") as error:
        read("empty.txt", "absent.txt")
    assert len(error.value.problems) == 2


def test_rows_that_are_too_few_to_be_split_are_an_error(read) -> None:  # type: ignore[no-untyped-def]
    Path("few.txt").write_text("Many words, so many that rows are left over. " * 40)
    with pytest.raises(PlanError, match=r"(?s)few.txt: 3 rows of 32 tokens are read, and 4 are needed.*[Uu]se --rows 4"):
        read("few.txt", rows=3)


@pytest.mark.parametrize("words", [1, 6, 30, 200])
def test_a_fit_says_what_a_search_would(work: Path, words: int) -> None:
    with Candidates("r.yml", RecipeOptions()) as recipe:
        one = opened("r.yml", recipe.prepare(recipe.start))
        Path("own.txt").write_text(" ".join(f"word {i} and" for i in range(words)))
        for tokens in (None, 64, 33, 16):
            fitting = fit(one.cutter, one.positions, "own.txt", tokens)
            assert fitting.tokens == (tokens or min(512, one.positions))
            if fitting.enough:
                read = read_texts(one, ("own.txt",), (), None, tokens)
                assert fitting.rows == sum(len(rows.ids) for rows in (*read.tune, *read.report))
                continue
            with pytest.raises(
                PlanError, match=rf"{fitting.rows} rows? of {fitting.tokens} tokens, and {fitting.needed} are needed"
            ):
                read_texts(one, ("own.txt",), (), None, tokens)
            if fitting.shorter:
                assert fit(one.cutter, one.positions, "own.txt", fitting.shorter).enough
                assert not fit(one.cutter, one.positions, "own.txt", 2 * fitting.shorter).enough
            else:
                assert not fit(one.cutter, one.positions, "own.txt", NARROWEST).enough
