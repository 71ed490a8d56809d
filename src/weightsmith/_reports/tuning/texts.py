"""Rows of text to tune on, and other rows for the report, which is read once, at the end."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightsmith._activations.rows import TOKENS, text_source
from weightsmith._activations.scored_rows import MAX_ROWS, Cutter, ScoredRows
from weightsmith._base.errors import ParameterError, PlanError, WeightsmithError
from weightsmith._base.options import assignment, option_error
from weightsmith._base.text import count
from weightsmith._features.any_recipe import prepare_any
from weightsmith._features.quantisation.options import QuantizeSettings
from weightsmith._planning.options import RecipeOptions
from weightsmith._planning.recipe import Source
from weightsmith._reports.evaluate.opening import Opened, opened

ROWS = 16
"""Rows of each text to tune on, unless the user gives a number."""

SPLIT_ROWS = 3 * ROWS // 2
"""Rows of a text that is split, whose last third is for the report."""

NARROWEST = 16
"""Tokens of the shortest rows that are offered for a short text."""

REPORT_ROWS = 64
"""Rows of each text of the report, unless the user gives a number."""

LEAST_ROWS = 4
"""Rows needed to split a text: two for tuning, and two for the report, the least that gives a standard error."""

RUN = 32
"""Tokens that are looked for in another text, one after the other."""

LEAST_RUN = 8
"""Shorter rows say nothing: they may be in any text."""

SHARES = 4, 2, 1
"""One row in this many is scored at each stage; the first is for every candidate."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Rows for scoring candidates, and rows for the report.

    names         of the texts to tune on
    tune          rows of each
    report_names  of the texts of the report
    report        rows of each
    """

    names: tuple[str, ...]
    tune: tuple[ScoredRows, ...]
    report_names: tuple[str, ...]
    report: tuple[ScoredRows, ...]

    @property
    def identity(self) -> list[str]:
        """Hashes of all rows."""
        return [rows.sha256 for rows in (*self.tune, *self.report)]


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a text is long enough for a search that keeps its last third for the report.

    rows    that it has, at most those that a search reads
    tokens  in each row
    needed  rows for a search
    shorter  tokens in each row with which it has enough rows; 0: it has enough, or is too short for any
    """

    rows: int
    tokens: int
    needed: int
    shorter: int

    @property
    def enough(self) -> bool:
        """Whether it has enough rows."""
        return self.rows >= self.needed


class RecipeTexts:
    """Cuts texts into rows of tokens as a search for a recipe's result does, to tell whether they are long enough.

    positions  the most tokens that a row may have
    tokens     in each row, unless the user gives a number
    """

    def __init__(self, recipe: Source) -> None:
        """Read the headers and the tokenizer of a recipe's models. Raises PlanError: the recipe, or one without a tokenizer."""
        with prepare_any(recipe, RecipeOptions(), QuantizeSettings()) as prepared:
            opened_recipe = opened("the merge", prepared)
        self._cutter, self.positions = opened_recipe.cutter, opened_recipe.positions
        self.tokens = min(TOKENS, self.positions)

    def fit(self, path: str | os.PathLike[str], tokens: int | None = None) -> Fit:
        """How many rows a text has. path: a file that `text` of `weightsmith.tune` may name. Raises ParameterError."""
        return fit(self._cutter, self.positions, os.fspath(path), tokens)


def fit(cutter: Cutter, positions: int, path: str, tokens: int | None) -> Fit:
    """How many rows a text has, without a search.

    positions, tokens  the most tokens that a row may have, and those asked for

    Raises as `Cutter.rows`, for a text that cannot be read or has fewer than two tokens.
    """
    width, most = tokens or min(TOKENS, positions), SPLIT_ROWS

    def rows(width: int) -> int:
        return len(_scored_rows(cutter, path, None, most, width)[1])

    row_count = rows(width)
    halves = (1 << n for n in range(width.bit_length(), NARROWEST.bit_length() - 2, -1))
    shorter = 0
    if row_count < LEAST_ROWS:
        shorter = next((half for half in halves if NARROWEST <= half < width and rows(half) >= LEAST_ROWS), 0)
    return Fit(row_count, width, LEAST_ROWS, shorter)


def stages(n: int) -> list[list[int]]:
    """The rows of a text that candidates are scored on, stage by stage, with those before: all of few.

    >>> stages(3)
    [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    >>> stages(9)
    [[0, 4, 8], [0, 2, 4, 6, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]]
    """
    return [list(range(0, n, 1 if n < SHARES[0] else share)) for share in SHARES]


def part(rows: ScoredRows, numbers: Sequence[int]) -> ScoredRows:
    """Some of the rows."""
    return ScoredRows(rows.ids[list(numbers)], rows.nbytes[list(numbers)])


def read_texts(one: Opened, texts: Sequence[str], report_texts: Sequence[str], rows: int | None, tokens: int | None) -> Texts:
    """Cut the texts. Without texts for the report, the last third of each text's rows is for the report.

    rows  of each text, in both parts together if it is split

    Raises PlanError with all problems: texts that cannot be read, are too short, or have rows in common.
    """
    width = tokens or min(TOKENS, one.positions)
    if width > one.positions:
        fix = f"use {assignment('tokens', one.positions)} or less"
        raise ParameterError(f"its rows have at most {one.positions:,} tokens, not {width:,}", where=one.name, fix=fix)
    problems: list[WeightsmithError] = []
    split = not report_texts
    most = rows or (SPLIT_ROWS if split else ROWS)
    tune = [_cut(one, path, rows, most, width, problems, least=LEAST_ROWS if split else 1) for path in texts]
    report = [_cut(one, path, None, REPORT_ROWS, width, problems, least=1) for path in report_texts]
    if problems:
        raise PlanError(problems)
    cut = [rows for rows in tune if rows is not None]
    held = [rows for rows in report if rows is not None]
    names = tuple(report_texts)
    if split:
        parts = [len(text_rows.ids) - max(2, len(text_rows.ids) // 3) for text_rows in cut]
        held = [part(text_rows, range(n, len(text_rows.ids))) for text_rows, n in zip(cut, parts, strict=True)]
        cut = [part(text_rows, range(n)) for text_rows, n in zip(cut, parts, strict=True)]
        names = tuple(texts)
    _check_apart(texts, cut, names, held, split=split)
    return Texts(tuple(texts), tuple(cut), names, tuple(held))


def _cut(
    one: Opened, path: str, rows: int | None, most: int, width: int, problems: list[WeightsmithError], least: int
) -> ScoredRows | None:
    try:
        scored, numbers = _scored_rows(one.cutter, path, rows, most, width)
    except WeightsmithError as error:
        problems.append(error)
        return None
    if len(numbers) < least:
        what = f"the text has {count(len(numbers), 'row')} of {width:,} tokens, and {least} are needed"
        fix = f"give a longer text, or shorter rows: {assignment('tokens', max(2, width // 4))}"
        if rows is not None and rows < least and len(scored.ids) == rows:
            what = f"{count(rows, 'row')} of {width:,} tokens {'are' if rows > 1 else 'is'} read, and {least} are needed"
            fix = f"use {assignment('rows', least)} or more"
        if least > 1:
            fix += "; or name a text for the report: --report-text (report_text)"
        problems.append(ParameterError(what, where=path, fix=fix))
        return None
    return part(scored, numbers)


def _scored_rows(cutter: Cutter, path: str, rows: int | None, most: int, width: int) -> tuple[ScoredRows, list[int]]:
    """The rows of a text, and the numbers of those with a token to score."""
    scored = cutter.rows(text_source(path, rows, width, 0, "text"), min(most, rows or MAX_ROWS))
    return scored, [i for i in range(len(scored.ids)) if (scored.nbytes[i] >= 0).any()]


def _check_apart(
    names: Sequence[str], tune: Sequence[ScoredRows], report_names: Sequence[str], report: Sequence[ScoredRows], *, split: bool
) -> None:
    """Raise PlanError if rows of the report are in a text to tune on, wherever they begin there."""
    problems: list[WeightsmithError] = []
    held_rows = [[ids for ids in _scored(held) if len(ids) >= LEAST_RUN] for held in report]
    run = min([RUN, *(len(ids) for text_rows in held_rows for ids in text_rows)])
    for name, rows in zip(names, tune, strict=True):
        whole = np.concatenate(_scored(rows))
        known = {_digest(whole[i : i + run]) for i in range(len(whole) - run + 1)}
        for other, text_rows in zip(report_names, held_rows, strict=True):
            shared = sum(_is_in(ids, known, run) for ids in text_rows)
            if shared:
                which = "the other rows of" if split and other == name else "the rows of"
                shared_rows = f"{shared:,} of {count(len(text_rows), 'row')} of {other}"
                what = f"{shared_rows} for the report are in {which} {name} to tune on too"
                fix = "give another text: a gain on rows that were tuned on says nothing"
                problems.append(option_error("report_text", what, fix))
    if problems:
        raise PlanError(problems)


def _scored(rows: ScoredRows) -> list[np.ndarray]:
    """The tokens of each row up to the last scored one."""
    return [ids[: np.flatnonzero(nbytes >= 0)[-1] + 1] for ids, nbytes in zip(rows.ids, rows.nbytes, strict=True)]


def _is_in(ids: np.ndarray, known: set[bytes], run: int) -> bool:
    """Whether half of the runs of a row, or more, are known."""
    starts = range(0, len(ids) - run + 1, run)
    return 2 * sum(_digest(ids[i : i + run]) in known for i in starts) >= len(starts)


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids).tobytes(), digest_size=8).digest()
